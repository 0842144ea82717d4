"""State of a model and its optimizer as named tensors, the same names under every strategy."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.distributed.tensor
from torch import nn
from torch.distributed.tensor import DTensor

from forge_dist._counted import counted
from forge_dist._errors import CheckpointError
from forge_dist.strategies._strategy import StoredState
from forge_dist.strategies._wrappers import resharded

MODEL, OPTIMIZER = "model/", "optimizer/"
"""Prefixes of names."""

GROUP = f"{OPTIMIZER}group:"
"""Prefix of names of what an optimizer counts in its groups."""

NUMBER = ":number"
"""Suffix of names of plain numbers."""

_GROUP_COUNTERS = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")
"""State that schedulefree keeps in its groups beside hyperparameters."""

_SCALES = ("absmax1", "absmax2")
"""Keys of what moments in 8 bits keep of each row, [rows, blocks]."""
_BY_ROW = (*_SCALES, "projected_avg", "projected_avg_sq", "update_norm")
"""Keys of what is divided as its parameter is, whatever its shape: scales, APOLLO's moments and its norms of a stack."""


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return `Strategy.state` of a model of plain tensors and DTensors."""
    model = resharded(model)
    return _model_state(model) | _optimizer_state(_names(model), optimizer) | _group_counters(optimizer)


def load_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, stored: StoredState) -> None:
    """Load a state as `Strategy.load_state`, into such a model."""
    model = resharded(model)
    names = _names(model)
    into = _model_state(model)
    there = stored.tensors
    # Of a version that froze less. Without moments it never moved, and goes on as it was; with them it is refused below.
    into |= {
        name: parameter.detach()
        for key, parameter in model.named_parameters()
        if not parameter.requires_grad and (name := f"{MODEL}{key}") in there
    }
    counters = _group_counters(optimizer)
    _compare({name for name in there if name.startswith(GROUP)}, set(counters), "the optimizer")
    _compare({name for name in there if not name.startswith(OPTIMIZER)}, set(into), "the model")
    into |= counters
    parameters = _trained(optimizer, names)
    planned = _optimizer_entries(there, parameters)
    for fqn, kept in planned.items():
        parameter, group = parameters[fqn]
        held = optimizer.state.get(parameter, {})
        if held:
            _compare({_name(fqn, key) for key in kept}, {_name(fqn, key) for key in _tensors(fqn, held)}, "the optimizer")
        for key, (shape, dtype) in kept.items():
            into[_name(fqn, key)] = held[key] if held else _allocate(key, shape, dtype, parameter, group)
    for name, tensor in into.items():
        _check_shape(name, tensor, there[name])
    stored.read(into)
    for fqn, kept in planned.items():
        state = optimizer.state[parameters[fqn].parameter]
        for key in kept:
            value = into[_name(fqn, key)]
            state[key.removesuffix(NUMBER)] = value.item() if key.endswith(NUMBER) else value
    for number, group in enumerate(optimizer.param_groups):
        group.update({key: into[name].item() for key in _GROUP_COUNTERS if (name := f"{GROUP}{number}/{key}") in counters})


class _Trained(NamedTuple):
    """A parameter and its group in the optimizer."""

    parameter: nn.Parameter
    group: Mapping[str, object]


def _name(fqn: str, key: str) -> str:
    return f"{OPTIMIZER}{fqn}/{key}"


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return trainable parameter → its first name; a tied one comes once."""
    return {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}


def _model_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state = {f"{MODEL}{name}": parameter.detach() for parameter, name in _names(model).items()}
    buffers = dict(model.named_buffers())
    if buffers:
        # Only a state_dict knows which buffers are persistent.
        state |= {f"{MODEL}{name}": buffers[name] for name in model.state_dict() if name in buffers}
    return state


def _optimizer_state(names: Mapping[nn.Parameter, str], optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for fqn, (parameter, _) in _trained(optimizer, names).items():
        state |= {_name(fqn, key): value for key, value in _tensors(fqn, optimizer.state.get(parameter, {})).items()}
    return state


def _trained(optimizer: torch.optim.Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, _Trained]:
    return {names[p]: _Trained(p, group) for group in optimizer.param_groups for p in group["params"]}


def _tensors(fqn: str, state: Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return the optimizer state of one parameter, without entries that are still None."""
    kept: dict[str, torch.Tensor] = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            kept[key] = value
        elif isinstance(value, bool | int | float):
            kept[f"{key}{NUMBER}"] = _as_tensor(value)
        elif value is not None:
            raise CheckpointError(
                f"the optimizer keeps {key}={value!r} for {fqn}, which is neither tensor nor number and cannot be saved"
            )
    return kept


def _group_counters(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return the group state of a schedule-free optimizer, which alone has a `train_mode`."""
    return {
        f"{GROUP}{number}/{key}": _as_tensor(group[key])
        for number, group in enumerate(optimizer.param_groups)
        for key in _GROUP_COUNTERS
        if "train_mode" in group
    }


def _as_tensor(value: float) -> torch.Tensor:
    """Return a plain number as a tensor, with all of its digits."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _optimizer_entries(
    there: Mapping[str, tuple[tuple[int, ...], torch.dtype]], parameters: Mapping[str, _Trained]
) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """Return parameter → the checkpoint's entries for it: key → shape and dtype.

    An optimizer keeps the same keys for every parameter of a group and kind that it has moved, and none for one that never had
    a
    gradient: so one of several keys cannot be missing unnoticed.
    """
    planned: dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]] = {}
    for name, what in there.items():
        if name.startswith(OPTIMIZER) and not name.startswith(GROUP):
            fqn, _, key = name.removeprefix(OPTIMIZER).rpartition("/")
            planned.setdefault(fqn, {})[key] = what
    unknown = {_name(fqn, key) for fqn, kept in planned.items() if fqn not in parameters for key in kept}
    _compare(unknown, set(), "the optimizer")
    keys: dict[tuple[object, ...], set[str]] = {}
    for fqn, kept in planned.items():
        keys.setdefault(_kind(parameters[fqn], kept), set()).update(kept)
    for fqn, kept in planned.items():
        same = keys[_kind(parameters[fqn], kept)]
        _compare({_name(fqn, key) for key in kept}, {_name(fqn, key) for key in same}, "the optimizer")
    return planned


def _kind(trained: _Trained, kept: Collection[str]) -> tuple[object, ...]:
    """Return which parameters of an optimizer keep the same keys.

    Adafactor keeps rows and columns of matrices, and vectors as they are; small parameters have no moments in 8 bits.
    """
    return id(trained.group), trained.parameter.dim() > 1, _SCALES[0] in kept


def _allocate(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: nn.Parameter, group: Mapping[str, object]
) -> torch.Tensor:
    if shape == tuple(parameter.shape) and shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    held = parameter.detach()
    if key in _BY_ROW and shape and isinstance(held, DTensor):
        made = torch.distributed.tensor.zeros(shape, dtype=dtype, device_mesh=held.device_mesh, placements=held.placements)
        return made.to(held.device)
    # Torch's own rule for the step counter: on the parameter's device only where a kernel reads it there.
    on_device = not key.startswith("step") or bool(group.get("fused") or group.get("capturable"))
    return torch.zeros(shape, dtype=dtype, device=parameter.device if on_device else "cpu")


def _compare(stored: set[str], wanted: set[str], whose: str) -> None:
    for verb, names in (("lacks", wanted - stored), ("has", stored - wanted)):
        if names:
            others = f" and {counted(len(names) - 1, 'others')}" if len(names) > 1 else ""
            more = ", which is not part of it" if verb == "has" else ""
            raise CheckpointError(f"the full state does not fit {whose}: it {verb} {min(names)}{others}{more}")


def _check_shape(name: str, tensor: torch.Tensor, stored: tuple[tuple[int, ...], torch.dtype]) -> None:
    shape, dtype = stored
    if tuple(shape) != tuple(tensor.shape) or dtype != tensor.dtype:
        raise CheckpointError(
            f"the full state does not fit: {name} is {dtype} {list(shape)} there and {tensor.dtype} {list(tensor.shape)} here"
        )
