"""Second moments of what targets are given on rows of earlier tasks, for OSFT to protect."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from forge_algos._errors import AdapterError
from forge_algos._modules import gathering, mode
from forge_algos.adaptations.osft._svd import lacks_float64
from forge_algos.batches._learned import RowLoader
from forge_algos.batches._packed import PackedBatch
from forge_algos.isolation._alone import tokens_of
from forge_algos.isolation._guard import guard_packed
from forge_algos.isolation._isolation import require_isolation


def osft_moments(
    model: nn.Module,
    batches: Sequence[PackedBatch],
    *,
    targets: Mapping[str, Sequence[str]],
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, torch.Tensor]:
    """Measure the second moment E[x xᵀ] of the inputs x of each target over some rows.

    It is taken over all of their tokens. Its eigenvectors are the principal components of what the layer is given there, as it
    is: the mean is not subtracted, for what moves with the mean is lost too.

    Args:
        model: not yet trained; it may be divided over ranks, all of which are given the same rows.
        batches: rows of what the model knows and is to keep.
        targets: name → full names of the linear layers that have one weight, mostly the name alone.
        autocast: makes the context of the forwards.

    Returns:
        dict: name → float64[M, M] (float32 where the device has no float64), M being the layer's inputs.

    Raises:
        AdapterError: there are no rows, a target is given nothing, or an input is not finite.
    """
    if not batches:
        raise AdapterError(
            "osft_directions='inputs' measures the inputs of layers on rows of earlier tasks, and was given none"
        )
    device = next(model.parameters()).device
    seen = {name: _Moment() for name in targets}
    with mode(model, training=False), guard_packed(model), torch.no_grad(), gathering(model), ExitStack() as hooks:
        require_isolation(model, device=device)
        load, shared = RowLoader(model, device), _Shared()
        for name, layers in targets.items():
            for layer in layers:
                hook = partial(_record, model, shared, seen[name])
                hooks.enter_context(model.get_submodule(layer).register_forward_pre_hook(hook, with_kwargs=True))
        for batch in batches:
            with autocast():
                model(**load(batch).inputs)
            shared.clear()
    found = {name: moment.mean() for name, moment in seen.items()}
    for name, moment in found.items():
        if moment is None:
            raise AdapterError(f"osft_directions='inputs': no row reached {name}; leave it out of target_modules")
        if not bool(torch.isfinite(moment).all()):
            raise AdapterError(f"osft_directions='inputs': inputs of {name} hold NaN or infinity; look at the model's files")
    return {name: moment for name, moment in found.items() if moment is not None}


class _Moment:
    """Running sum of x xᵀ."""

    def __init__(self) -> None:
        self._sum: torch.Tensor | None = None
        self._tokens = 0

    def add(self, moment: torch.Tensor, tokens: int) -> None:
        self._sum = moment.clone() if self._sum is None else self._sum.add_(moment)
        self._tokens += tokens

    def mean(self) -> torch.Tensor | None:
        return None if self._sum is None else self._sum / self._tokens


class _Shared:
    """Moments of the last inputs of a forward: several layers are given the same tensor."""

    def __init__(self) -> None:
        self._held: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def moment(self, model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return (x xᵀ summed over the tokens, their number)."""
        for held, moment, count in self._held:
            if held is x:
                return moment, count
        tokens = _wide(tokens_of(model, x))
        found = tokens.T @ tokens, len(tokens)
        # The tensor is held, so that no other gets its place.
        self._held = [*self._held[-3:], (x, *found)]
        return found

    def clear(self) -> None:
        """Forget them, after a forward."""
        self._held = []


def _wide(tokens: torch.Tensor) -> torch.Tensor:
    try:
        return tokens.double()
    except (TypeError, RuntimeError) as error:
        if not lacks_float64(error):
            raise
        return tokens.float()


def _record(
    model: nn.Module, shared: _Shared, moment: _Moment, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Add the moment of a target's inputs; a forward hook."""
    del module
    x = args[0] if args else kwargs["input"]
    with torch.autocast(x.device.type, enabled=False):
        found, tokens = shared.moment(model, x)
        if tokens:
            moment.add(found, tokens)
