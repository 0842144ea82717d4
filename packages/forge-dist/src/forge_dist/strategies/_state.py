"""A model and its optimizer ↔ named tensors, the same names under every strategy."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import nn

from forge_dist._errors import CheckpointError
from forge_dist.strategies._strategy import StoredState
from forge_dist.strategies._wrappers import resharded

MODEL, OPTIMIZER = "model/", "optimizer/"
GROUP = f"{OPTIMIZER}group:"
NUMBER = ":number"

_COUNTED = ("k", "weight_sum", "lr_max", "scheduled_lr", "train_mode")
"""What schedulefree keeps in its groups beside hyperparameters."""

_IN_8_BITS = "qmap1"


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """`Strategy.state` of a model whose tensors and DTensors are its own state."""
    model = resharded(model)
    return _model_state(model) | _optimizer_state(_names(model), optimizer) | _counts(optimizer)


def load_training_state(model: nn.Module, optimizer: torch.optim.Optimizer, stored: StoredState) -> None:
    """`Strategy.load_state` of such a model."""
    model = resharded(model)
    names = _names(model)
    into = _model_state(model)
    there = stored.tensors
    counts = _counts(optimizer)
    _compare({name for name in there if name.startswith(GROUP)}, set(counts), "the optimizer")
    _compare({name for name in there if not name.startswith(OPTIMIZER)}, set(into), "the model")
    into |= counts
    parameters = _trained(optimizer, names)
    planned = _planned(there, parameters)
    for fqn, kept in planned.items():
        parameter, group = parameters[fqn]
        held = optimizer.state.get(parameter, {})
        if held:
            _compare({_name(fqn, key) for key in kept}, {_name(fqn, key) for key in _tensors(fqn, held)}, "the optimizer")
        for key, (shape, dtype) in kept.items():
            into[_name(fqn, key)] = held[key] if held else _made(key, shape, dtype, parameter, group)
    for name, tensor in into.items():
        _check_like(name, tensor, there[name])
    stored.read(into)
    for fqn, kept in planned.items():
        state = optimizer.state[parameters[fqn].parameter]
        for key in kept:
            value = into[_name(fqn, key)]
            state[key.removesuffix(NUMBER)] = value.item() if key.endswith(NUMBER) else value
    for number, group in enumerate(optimizer.param_groups):
        group.update({key: into[name].item() for key in _COUNTED if (name := f"{GROUP}{number}/{key}") in counts})


class _Trained(NamedTuple):
    """A parameter with its group in the optimizer."""

    parameter: nn.Parameter
    group: Mapping[str, object]


def _name(fqn: str, key: str) -> str:
    return f"{OPTIMIZER}{fqn}/{key}"


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    """Each trainable parameter's first name; a tied one is met once."""
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
    """What an optimizer keeps for one parameter, without what it has not begun to keep (None)."""
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


def _counts(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """What a schedule-free optimizer, which alone has a mode, keeps in its groups."""
    return {
        f"{GROUP}{number}/{key}": _as_tensor(group[key])
        for number, group in enumerate(optimizer.param_groups)
        for key in _COUNTED
        if "train_mode" in group
    }


def _as_tensor(value: float) -> torch.Tensor:
    """A plain number with all of its digits."""
    return torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else None)


def _planned(
    there: Mapping[str, tuple[tuple[int, ...], torch.dtype]], parameters: Mapping[str, _Trained]
) -> dict[str, dict[str, tuple[tuple[int, ...], torch.dtype]]]:
    """What the checkpoint keeps for each parameter of the optimizer.

    An optimizer keeps the same for every parameter of a group and kind that it has moved, and nothing for one that never had a gradient: so
    one of several keys cannot be missing unnoticed.
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
    """Adafactor keeps rows and columns of matrices, and vectors as they are; bitsandbytes keeps small parameters in 32 bits."""
    return id(trained.group), trained.parameter.dim() > 1, _IN_8_BITS in kept


def _made(
    key: str, shape: tuple[int, ...], dtype: torch.dtype, parameter: nn.Parameter, group: Mapping[str, object]
) -> torch.Tensor:
    if shape == tuple(parameter.shape) and shape:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    # Torch's own rule for the count of steps: with the parameter only where a kernel reads it there.
    beside = not key.startswith("step") or bool(group.get("fused") or group.get("capturable"))
    return torch.zeros(shape, dtype=dtype, device=parameter.device if beside else "cpu")


def _compare(stored: set[str], wanted: set[str], whose: str) -> None:
    for verb, names in (("lacks", wanted - stored), ("has", stored - wanted)):
        if names:
            others = f" and {len(names) - 1} others" if len(names) > 1 else ""
            more = ", which is not part of it" if verb == "has" else ""
            raise CheckpointError(f"the full state does not fit {whose}: it {verb} {min(names)}{others}{more}")


def _check_like(name: str, tensor: torch.Tensor, stored: tuple[tuple[int, ...], torch.dtype]) -> None:
    shape, dtype = stored
    if tuple(shape) != tuple(tensor.shape) or dtype != tensor.dtype:
        raise CheckpointError(
            f"the full state does not fit: {name} is {dtype} {list(shape)} there and {tensor.dtype} {list(tensor.shape)} here"
        )
