"""State of ZeRO training as named tensors, the same names as under other strategies.

DeepSpeed's partitions are ranges of flat buffers, which mean nothing on another number of ranks. So each parameter (and each of
its moments) is gathered once, cut along its first dimension as FSDP does, and only this rank's rows are kept, in host memory.
At any moment a rank holds one whole tensor. DeepSpeed's public functions for that (`deepspeed.utils.safe_...`) are the only
access.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from forge_dist._counted import counted
from forge_dist._errors import CheckpointError
from forge_dist.loading._unwrap import is_partitioned, unwrapped
from forge_dist.strategies._gather import destinations, first_ranks, once
from forge_dist.strategies._state import MODEL, OPTIMIZER
from forge_dist.strategies._strategy import StoredState, Wanted

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks


class ZeroState:
    """State of one engine."""

    def __init__(
        self,
        engine: Any,
        stage: int,
        groups: list[list[nn.Parameter]],
        optimizer: torch.optim.Optimizer,
        ranks: "Ranks",
    ) -> None:
        """Keep the engine, and each optimizer group's parameters before DeepSpeed flattened them."""
        self._engine = engine
        self._stage = stage
        self._groups = groups
        self._optimizer = optimizer
        self._ranks = ranks
        # Rows are kept in host memory, wherever the model computes.
        self._mesh = init_device_mesh("cpu", (ranks.world_size,))
        trained = {id(parameter) for group in groups for parameter in group}
        self._names = {name: p for name, p in engine.module.named_parameters() if id(p) in trained}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return `Strategy.state`: copies, in host memory."""
        state = {f"{MODEL}{name}": self._own_rows(self._weight(p)) for name, p in self._names.items()}
        state |= {f"{MODEL}{name}": buffer for name, buffer in _buffers(self._engine.module).items()}
        counters = self._step_counters()
        self._link_moments()
        for name, parameter in self._names.items():
            for key, value in self._partition_state().items():
                whole = counters[key].clone() if key in counters else self._moment(parameter, key, value.dtype)
                state[f"{OPTIMIZER}{name}/{key}"] = whole if key in counters else self._own_rows(whole)
        return state

    def load(self, stored: StoredState) -> None:
        """Load a state as `Strategy.load_state`."""
        into = self._allocate(stored.tensors)
        stored.read(into)
        self._check_step_counters(into)
        self._refuse_moved(into)
        keys = self._keys(stored.tensors)
        self._create_state(stored.tensors, keys)
        self._link_moments()
        for name, parameter in self._names.items():
            self._set_weight(parameter, self._gathered(into[f"{MODEL}{name}"]))
            for key in keys:
                value = into[f"{OPTIMIZER}{name}/{key}"]
                if isinstance(value, DTensor):
                    self._set_moment(parameter, key, self._gathered(value))
                else:
                    for flat in self._partitions():
                        self._optimizer.state[flat][key].copy_(value)

    # Expected names and tensors to read into

    def _allocate(self, there: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, torch.Tensor]:
        """Return a tensor to read into for each name, if names, shapes and dtypes fit."""
        into: dict[str, torch.Tensor] = {}
        buffers = _buffers(self._engine.module)
        wanted = {f"{MODEL}{name}" for name in (*self._names, *buffers)}
        wanted |= {f"{OPTIMIZER}{name}/{key}" for name in self._names for key in self._keys(there)}
        frozen = {f"{MODEL}{name}" for name in self._frozen_in(there)}
        frozen |= {f"{OPTIMIZER}{name}/{key}" for name in self._frozen_in(there) for key in self._keys(there)} & set(there)
        _compare(set(there), wanted | frozen)
        into |= {name: self._empty(*there[name]) for name in frozen}
        for name, parameter in self._names.items():
            shape = _shape(parameter)
            _check_shape(f"{MODEL}{name}", there, shape, parameter.dtype)
            into[f"{MODEL}{name}"] = self._empty(shape, parameter.dtype)
            for key in self._keys(there):
                full = f"{OPTIMIZER}{name}/{key}"
                found, dtype = there[full]
                if tuple(found):
                    _check_shape(full, there, shape, torch.float32)
                into[full] = self._empty(shape, dtype) if tuple(found) else torch.zeros((), dtype=dtype)
        for name, buffer in buffers.items():
            _check_shape(f"{MODEL}{name}", there, tuple(buffer.shape), buffer.dtype)
            into[f"{MODEL}{name}"] = buffer
        return into

    def _keys(self, there: Mapping[str, object]) -> list[str]:
        """Return the optimizer's keys for each parameter: those that it has, else the checkpoint's."""
        listed = {name.rpartition("/")[2] for name in there if name.startswith(OPTIMIZER)}
        return sorted(set(self._partition_state()) or listed)

    def _frozen_in(self, there: Iterable[str]) -> dict[str, nn.Parameter]:
        """Return the weights that are frozen here and not in a state, of a version that froze less."""
        frozen = {name: p for name, p in self._engine.module.named_parameters() if not p.requires_grad}
        return {name: frozen[name] for name in frozen.keys() & {each.removeprefix(MODEL) for each in there}}

    def _refuse_moved(self, into: Mapping[str, torch.Tensor]) -> None:
        """Raise CheckpointError where a weight that is frozen here had moved in the state.

        One that had not has moments all the same: DeepSpeed's are those of a whole partition.
        """
        import deepspeed

        for name, parameter in sorted(self._frozen_in(into).items()):
            with deepspeed.zero.GatheredParameters([parameter]) if is_partitioned(parameter) else nullcontext():
                moved = not torch.equal(self._gathered(into[f"{MODEL}{name}"]), parameter.detach())
            moments = [value for key, value in sorted(into.items()) if key.startswith(f"{OPTIMIZER}{name}/") and value.dim()]
            if any([moved, *(bool(self._gathered(moment).any()) for moment in moments)]):
                raise CheckpointError(
                    f"the full state does not fit: {MODEL}{name} learned there, and is frozen here: resume with the versions "
                    "that it was saved with"
                )

    def _check_step_counters(self, into: Mapping[str, torch.Tensor]) -> None:
        first: dict[str, tuple[str, torch.Tensor]] = {}
        for name, value in into.items():
            if name.startswith(OPTIMIZER) and not isinstance(value, DTensor):
                other, known = first.setdefault(name.rpartition("/")[2], (name, value))
                if not torch.equal(known, value):
                    raise CheckpointError(
                        f"the full state does not fit ZeRO, which counts steps once for all parameters: {name} is "
                        f"{value.item():g} and {other} {known.item():g}"
                    )

    # The optimizer's flat partitions

    def _partitions(self) -> list[torch.Tensor]:
        """Return this rank's flat partitions, which the optimizer moves."""
        wrapper = self._engine.optimizer
        return list(wrapper.fp32_partitioned_groups_flat if self._stage == 3 else wrapper.single_partition_of_fp32_groups)

    def _partition_state(self) -> dict[str, torch.Tensor]:
        """Return the optimizer's state of its first flat partition; it has the same keys for all."""
        held = self._optimizer.state.get(self._partitions()[0], {})
        for key, value in held.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(f"the optimizer keeps {key}={value!r}, which is no tensor and cannot be saved")
        return dict(held)

    def _step_counters(self) -> dict[str, torch.Tensor]:
        """Return the state that is no moment of a parameter: the step counter."""
        return {key: value for key, value in self._partition_state().items() if not value.dim()}

    def _create_state(self, there: Mapping[str, tuple[tuple[int, ...], torch.dtype]], keys: list[str]) -> None:
        """Create the state that the optimizer would create in its first step."""
        on_device = any(group.get("fused") or group.get("capturable") for group in self._optimizer.param_groups)
        first = next(iter(self._names))
        for flat in self._partitions():
            held = self._optimizer.state[flat]
            for key in keys if not held else ():
                shape, dtype = there[f"{OPTIMIZER}{first}/{key}"]
                # Torch's own rule for the step counter: on the parameter's device only where a kernel reads it there.
                held[key] = (
                    torch.zeros_like(flat, requires_grad=False)
                    if tuple(shape)
                    else torch.zeros((), dtype=dtype, device=flat.device if on_device else "cpu")
                )

    def _link_moments(self) -> None:
        """Link parameters to their moments, which stages 1 and 2 do after their first step only."""
        if self._stage < 3 and self._partition_state():
            from deepspeed.utils import lazy_init_hp_params_optimizer_state

            for group, flat in zip(self._groups, self._partitions(), strict=True):
                lazy_init_hp_params_optimizer_state(group, flat, self._optimizer.state)

    # One parameter, whole

    def _weight(self, parameter: nn.Parameter) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_fp32_param

        # Under stages 1 and 2 every rank holds it.
        found: Any = safe_get_full_fp32_param(parameter) if self._stage == 3 else parameter.detach()
        return found

    def _set_weight(self, parameter: nn.Parameter, whole: torch.Tensor) -> None:
        import deepspeed
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        if self._stage < 3:
            parameter.data.copy_(whole)
            safe_set_full_fp32_param(parameter, whole)
            return
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if self._ranks.is_first:
                parameter.data.copy_(whole)
        safe_set_local_fp32_param(parameter, self._stage3_part(parameter, whole))

    def _moment(self, parameter: nn.Parameter, key: str, dtype: torch.dtype) -> torch.Tensor:
        from deepspeed.utils import safe_get_full_optimizer_state

        found: Any = safe_get_full_optimizer_state(parameter, key)
        return found.to(dtype)

    def _set_moment(self, parameter: nn.Parameter, key: str, whole: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self._stage < 3:
            safe_set_full_optimizer_state(parameter, whole, key)
        else:
            safe_set_local_optimizer_state(parameter, self._stage3_part(parameter, whole), key)

    def _stage3_part(self, parameter: nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a whole tensor in stage 3.

        An equal range, flat, with zeros behind the last element.
        """
        from deepspeed.utils import safe_get_local_fp32_param

        part = torch.zeros_like(safe_get_local_fp32_param(parameter))
        # DeepSpeed's function for a whole tensor cannot cut one that the ranks do not divide evenly.
        mine = whole.flatten()[self._ranks.rank * part.numel() :][: part.numel()]
        part[: mine.numel()].copy_(mine)
        return part

    # One parameter, cut

    def _own_rows(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows, as torch.chunk cuts them; a tensor of no dimensions stays whole."""
        if not whole.dim():
            return whole.to("cpu", copy=True)
        pieces = whole.chunk(self._ranks.world_size)
        mine = pieces[self._ranks.rank] if self._ranks.rank < len(pieces) else whole[:0]
        return self._as_dtensor(mine.to("cpu", copy=True), whole.shape)

    def _empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if not shape:
            return torch.zeros((), dtype=dtype)
        rows = -(-shape[0] // self._ranks.world_size)
        mine = min(rows, max(0, shape[0] - rows * self._ranks.rank))
        return self._as_dtensor(torch.zeros((mine, *shape[1:]), dtype=dtype), torch.Size(shape))

    def _as_dtensor(self, local: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(local, self._mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)

    def _gathered(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the whole tensor, on the device, on every rank."""
        if not isinstance(tensor, DTensor):
            return tensor.to(self._engine.device)
        world_size, (count, *rest) = self._ranks.world_size, tensor.shape
        rows = -(-count // world_size)
        local = tensor.to_local()
        padded = torch.zeros((rows, *rest), dtype=tensor.dtype, device=self._engine.device)
        padded[: len(local)].copy_(local)
        pieces = [torch.empty_like(padded) for _ in range(world_size)]
        distributed.all_gather(pieces, padded)
        return torch.cat(pieces)[:count]


def whole_tensors(model: nn.Module, names: Wanted | None, ranks: "Ranks") -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate as `Strategy.whole`, over a wrapped model or the model itself."""
    import deepspeed

    model = unwrapped(model)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    for name, wanted_on in destinations(once({name: tensors[name] for name in model.state_dict()}), names).items():
        tensor, wanted = tensors[name], ranks.rank in wanted_on
        if not is_partitioned(tensor):
            held = tensor.detach() if isinstance(tensor, nn.Parameter) else first_ranks(tensor, wanted_on, ranks)
            yield name, held.cpu() if wanted else None
            continue
        with deepspeed.zero.GatheredParameters([tensor]):
            whole = tensor.detach().to("cpu", copy=True) if wanted else None
        yield name, whole


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the persistent buffers, which only a state_dict knows."""
    buffers = dict(model.named_buffers())
    return {name: buffers[name] for name in model.state_dict() if name in buffers} if buffers else {}


def _shape(parameter: nn.Parameter) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _compare(stored: set[str], wanted: set[str]) -> None:
    for verb, names in (("lacks", wanted - stored), ("has", stored - wanted)):
        if names:
            others = f" and {counted(len(names) - 1, 'others')}" if len(names) > 1 else ""
            more = ", which is not part of the run" if verb == "has" else ""
            raise CheckpointError(f"the full state does not fit: it {verb} {min(names)}{others}{more}")


def _check_shape(
    name: str, there: Mapping[str, tuple[tuple[int, ...], torch.dtype]], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    found_shape, found_dtype = there[name]
    if tuple(found_shape) != shape or found_dtype != dtype:
        raise CheckpointError(
            f"the full state does not fit: {name} is {found_dtype} {list(found_shape)} there and {dtype} {list(shape)} here"
        )
