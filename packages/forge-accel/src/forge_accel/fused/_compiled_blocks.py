"""Repeated blocks of a model → the same, compiled once for all (regional compilation).

All blocks of a kind share one graph, whose rows have any length: nothing is compiled anew when the row size changes. Hooks
around a block, which gather and free its weights, stay outside of the graph; so do names of parameters. Only training is
compiled: a forward without gradients, or in evaluation mode, is the block's own.
"""

from __future__ import annotations

import time
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from forge_accel.fused._replaced_forward import ReplacedForward, may_replace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Most difference between a block's outputs, compiled and not, over the norm of the output."""


class CompiledBlocks:
    """Blocks of a model whose training forwards run compiled; `remove()` undoes it.

    The first training forward of each kind of block is made both ways and compared. What cannot be compiled as one graph, or
    does not give the same outputs, runs as it stands from then on, and `problem` says why: a run does not end for that.

    Args:
        blocks: Modules that a model repeats, each called once a forward.
        backend: Backend of `torch.compile`: `inductor`, or a function that takes a graph.
        note: Called with a line for the log, when a kind of block has been compiled and where it cannot be.

    """

    problem: str | None = None
    """Reason for which the blocks run uncompiled after all; None while they do not."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        backend: str | Callable[..., Any] = "inductor",
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._note, self._proven = note, set[type]()
        # torch keeps graphs by code object, and limits how many one may have: each model's blocks get one of their own.
        own = FunctionType(_forward.__code__.replace(), globals(), "block")
        self._compiled = torch.compile(own, backend=backend, fullgraph=True, dynamic=True)
        self.blocks = [_CompiledForward(block, self) for block in blocks if may_replace(block)]
        for block in self.blocks:
            block.install()

    def remove(self) -> None:
        """Let the blocks compute by their classes' forwards."""
        for block in self.blocks:
            block.remove()

    def run(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a block's forward in its graph; by the block itself where that is not possible."""
        if self.problem is None:
            try:
                if type(block) in self._proven:
                    return self._compiled(block, *args, **kwargs)
                return self._first(block, args, kwargs)
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                inner = getattr(error, "inner_exception", error)
                self._give_up(f"{type(inner).__name__}: {_first_line(inner)}")
        return type(block).forward(block, *args, **kwargs)

    def _first(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile a kind of block, and compare it with the block's own forward."""
        before = _random_states(args, kwargs)
        with torch.no_grad():
            expected = type(block).forward(block, *args, **kwargs)
        drawn = any(not torch.equal(*pair) for pair in zip(before, _random_states(args, kwargs), strict=True))
        _set_random_states(before, args, kwargs)
        started = time.perf_counter()
        # Numbers of a layer (its epsilon) are constants: traced as inputs first, they would be looked at twice.
        with torch._dynamo.config.patch(specialize_float=True):
            found = self._compiled(block, *args, **kwargs)
        seconds = time.perf_counter() - started
        # Compiled dropout draws other numbers.
        if not drawn and (apart := _apart(found, expected)) is not None:
            self._give_up(f"its first outputs differ from the block's own by {apart:.1e} of their norm")
            return type(block).forward(block, *args, **kwargs)
        self._proven.add(type(block))
        compared = "drawing random numbers, it was not compared" if drawn else "its outputs are the block's own"
        self._note(f"compile: {type(block).__name__} in {seconds:.1f} s, one graph for all of its kind; {compared}")
        return found

    def _give_up(self, why: str) -> None:
        self.problem = why
        self._note(f"WARNING: compile: the blocks run uncompiled: {why}")


class _CompiledForward(ReplacedForward):
    """Forward of one block: compiled while it trains."""

    def __init__(self, block: nn.Module, shared: CompiledBlocks) -> None:
        super().__init__(block)
        self._shared = shared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block's forward."""
        if self.module.training and torch.is_grad_enabled():
            return self._shared.run(self.module, args, kwargs)
        return super().__call__(*args, **kwargs)


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a block's forward without its hooks."""
    return type(block).forward(block, *args, **kwargs)


def _apart(found: Any, expected: Any) -> float | None:
    """Return how far two outputs are apart, over their norms; None within the tolerance."""
    worst = 0.0
    for ours, theirs in zip(_tensors(found), _tensors(expected), strict=True):
        if not theirs.is_floating_point():
            continue
        kind = ours.device.type
        computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else ours.dtype
        difference = (ours.detach() - theirs).float().norm() / theirs.float().norm().clamp_min(1e-30)
        # A number that is none is not within either.
        worst = max(worst, float(difference.nan_to_num(nan=float("inf"))) / _TOLERANCE.get(computed, 3e-2))
    return None if worst <= 1 else worst


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


def _generators(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the modules with the random states that a forward may draw from."""
    kinds = {tensor.device.type for tensor in _tensors((args, kwargs))} - {"cpu", "meta"}
    return [torch, *(torch.get_device_module(kind) for kind in sorted(kinds))]


def _random_states(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    return [generator.get_rng_state() for generator in _generators(args, kwargs)]


def _set_random_states(states: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for generator, state in zip(_generators(args, kwargs), states, strict=True):
        generator.set_rng_state(state)


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "no message")
