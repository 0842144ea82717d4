"""Quantization-aware training: weights rounded to a GGUF type while a step computes.

Forward and backward see the rounded weights; the gradient at them moves the unrounded ones (the straight-through estimator,
arXiv 1308.3432, as in BinaryConnect, 1511.00363). Rounding is done once a step, in the place of the weights: whatever reads
them, a layer, a fused head or a recomputation, reads what a file of that type holds.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_algos._errors import OptimizerError
from forge_algos._modules import UNROUNDED, free_gathered, override_forward, unwrap
from forge_algos.optimizers._divided import local
from forge_algos.training._merged_layers import Rounded, rounded_parameters

BLOCK = 32
"""Numbers of a row that share one scale."""
_AT_ONCE = 1 << 22
"""Most numbers that are rounded at a time, in several float32 copies."""


def fake_quantize(weight: torch.Tensor, kind: str) -> torch.Tensor:
    """Round a tensor as a GGUF type stores it, and return the values that a reader finds.

    They are those of the package gguf (`quants.quantize`, then `dequantize`). Numbers that are not finite make their block NaN.

    Args:
        weight: float[..., n]; rounded as float32.
        kind: float16, q8_0, q5_0, q5_1, q4_0 or q4_1; but for float16 32 divides n.

    Returns:
        float32[..., n].

    Raises:
        ValueError: an unknown type, or rows that no block divides.

    >>> fake_quantize(torch.linspace(-1, 1, 32), "q4_0").unique().numel()
    16
    """
    if kind == "float16":
        return weight.to(torch.float16).float()
    if kind not in _KINDS:
        raise ValueError(f"kind must be float16 or one of {', '.join(_KINDS)}, got {kind!r}")
    if weight.shape[-1] % BLOCK:
        raise ValueError(f"{kind} holds blocks of {BLOCK} numbers, and a row has {weight.shape[-1]}")
    return _KINDS[kind](weight.float().reshape(-1, BLOCK)).reshape(weight.shape)


def _inverse(scale: torch.Tensor) -> torch.Tensor:
    """Return 1 / scale; 0 where that is infinite, for such a block is stored as zeros."""
    inverse = 1.0 / scale
    return torch.where(inverse.isinf(), 0.0, inverse)


def _divided(numbers: torch.Tensor, by: int) -> torch.Tensor:
    """Divide by a tensor: by a number some devices multiply by its rounded inverse."""
    return numbers / torch.full_like(numbers, by)


def _stored(scale: torch.Tensor) -> torch.Tensor:
    return scale.to(torch.float16).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    scale = _divided(blocks.abs().amax(-1, keepdim=True), 127)
    exact = blocks * _inverse(scale)
    whole = exact.abs().floor()
    rounded = exact.sign() * (whole + (2 * (exact.abs() - whole)).floor())  # halves away from zero
    return (rounded + 0.0) * _stored(scale)  # 0.0: of -0.0, which no integer is


def _around_zero(half: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make the rounding to 2 · half integers, the lowest for the largest magnitude."""

    def rounded(blocks: torch.Tensor) -> torch.Tensor:
        largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
        scale = _divided(largest, -half)
        whole = (blocks * _inverse(scale) + (half + 0.5)).trunc().clamp(0, 2 * half - 1)
        return (whole - half) * _stored(scale)

    return rounded


def _from_least(steps: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Make the rounding to equal steps between a block's least and largest number."""

    def rounded(blocks: torch.Tensor) -> torch.Tensor:
        least = blocks.amin(-1, keepdim=True)
        scale = _divided(blocks.amax(-1, keepdim=True) - least, steps)
        whole = ((blocks - least) * _inverse(scale) + 0.5).trunc().clamp(0, steps)
        return _stored(scale) * whole + _stored(least)

    return rounded


_KINDS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q8_0": _q8_0,
    "q5_0": _around_zero(16),
    "q5_1": _from_least(31),
    "q4_0": _around_zero(8),
    "q4_1": _from_least(15),
}


class InPlace(Protocol):
    """What puts other weights in the place of a model's, for a while."""

    def in_place(self) -> AbstractContextManager[None]:
        """Put them in place inside the block."""
        ...


class QuantizedWeights:
    """Weights that are rounded while a model computes, and unrounded while they are moved.

    >>> model = nn.Linear(32, 4, bias=False)
    >>> before = model.weight.detach().clone()
    >>> with QuantizedWeights(model, {"weight": "q4_0"}).in_place():
    ...     bool((model.weight == fake_quantize(before, "q4_0")).all())
    True
    >>> bool((model.weight == before).all())
    True
    """

    def __init__(self, model: nn.Module, kinds: Mapping[str, str]) -> None:
        """Take a model as the optimizer has it, wrapped and divided or not.

        Args:
            model: without an adapter, or with LoRA, rsLoRA or DoRA; its weights may be divided by rows (FSDP2), or by columns
                of whole blocks.
            kinds: name of each weight that is rounded, as it is once an adapter is merged → its type, as of `fake_quantize`;
                trained or frozen.

        Raises:
            OptimizerError: a weight is not there, ranks divide it inside of its blocks, or its adapter is of another form.
        """
        self._model, self._weights = model, list[tuple[Rounded, str]]()
        self._kept: list[torch.Tensor] = []
        for name, kind in kinds.items():
            found = rounded_parameters(model, name)
            if not found:
                raise OptimizerError(f"the model has no weight {name}, which was to be rounded to {kind}")
            if kind != "float16" and any(_cut(each.parameter) for each in found):
                raise OptimizerError(
                    f"{kind} rounds blocks of {BLOCK} numbers of a row, and ranks divide {name} inside of them: train with "
                    "strategy=fsdp2, ddp, zero1 or zero2, without tp_size"
                )
            self._weights += [(each, kind) for each in found]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the rounded weights in place inside the block.

        Afterwards the unrounded ones are back to the bit. Meanwhile a copy of what this process holds of them lies beside.
        Where an adapter is switched off meanwhile, its base computes unrounded. Inside another such block this changes nothing.
        """
        if self._kept:
            yield
            return
        free_gathered(self._model)
        self._kept = [local(weight.parameter).clone() for weight, _ in self._weights]
        inner = unwrap(self._model)
        with ExitStack() as stack:
            try:
                for (weight, kind), before in zip(self._weights, self._kept, strict=True):
                    if weight.layer is not None:
                        stack.enter_context(override_forward(weight.layer.layer, partial(weight.layer.forward, before)))
                        local(weight.parameter).copy_(_rounded(weight.layer.merged(before), kind))
                    else:
                        _round_(local(weight.parameter), kind)
                # An autocast that is open would go on with its casts of the former weights.
                torch.clear_autocast_cache()
                vars(inner)[UNROUNDED] = self._taken_back
                yield
            finally:
                vars(inner).pop(UNROUNDED, None)
                free_gathered(self._model)
                for (weight, _), before in zip(self._weights, self._kept, strict=True):
                    local(weight.parameter).copy_(before)
                self._kept = []
                torch.clear_autocast_cache()

    def round(self) -> None:
        """Round them for good, of a model without an adapter beside a weight."""
        for weight, kind in self._weights:
            if weight.layer is not None:
                raise OptimizerError("an adapter is merged before its weights are rounded for good: merge_and_unload")
            _round_(local(weight.parameter), kind)

    @contextmanager
    def _taken_back(self) -> Iterator[None]:
        """Put the unrounded weights in place inside a block that is inside of `in_place`."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    def _swap(self) -> None:
        free_gathered(self._model)
        for (weight, _), beside in zip(self._weights, self._kept, strict=True):
            here = local(weight.parameter)
            was = here.clone()
            here.copy_(beside)
            beside.copy_(was)
        torch.clear_autocast_cache()


def _rounded(weight: torch.Tensor, kind: str) -> torch.Tensor:
    _round_(weight, kind)
    return weight


@torch.no_grad()
def _round_(held: torch.Tensor, kind: str) -> None:
    at_once = max(1, _AT_ONCE // max(1, held[:1].numel()))
    for begin in range(0, held.shape[0], at_once):
        part = held[begin : begin + at_once]
        part.copy_(fake_quantize(part, kind))


def _cut(weight: torch.Tensor) -> bool:
    """Return whether ranks divide a weight inside of its blocks; each answers alike."""
    if not isinstance(weight, DTensor):
        return weight.numel() == 0 or bool(weight.shape[-1] % BLOCK)
    parts = 1
    for dim, placement in enumerate(weight.placements):
        if getattr(placement, "dim", None) in (-1, weight.ndim - 1):
            parts *= weight.device_mesh.size(dim)
    return bool(-(-weight.shape[-1] // parts) % BLOCK)
