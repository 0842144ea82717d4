"""Repeated blocks of a model → the same, compiled once for all (regional compilation).

All blocks of a kind share one graph, whose rows have any length: nothing is compiled anew when the row size changes. Hooks
around a block, which gather and free its weights, stay outside of the graph; so do names of parameters. Only training is
compiled: a forward without gradients, or in evaluation mode, is the block's own.
"""

from __future__ import annotations

import math
import time
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from forge_accel.fused._replaced_forward import ReplacedForward, may_replace

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Most difference between a block's outputs or gradients, compiled and not, over their norm."""


class CompiledBlocks:
    """Blocks of a model whose training forwards run compiled; `remove()` undoes it.

    Before the first training forward of each kind of block, forward and backward are made both ways and compared. What cannot
    be compiled as one graph, or does not give the same outputs and gradients, runs as it stands from then on, and `problem`
    says why: a run does not end for that.

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
        self._note, self._proven, self._named = note, set[tuple[type, tuple[bool, ...]]](), set[type]()
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
                kind = type(block), tuple(tensor.requires_grad for tensor in _tensors((args, kwargs)))
                if kind not in self._proven and self._proves(block, args, kwargs):
                    self._proven.add(kind)
                if self.problem is None:
                    return self._compiled(block, *args, **kwargs)
            except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
                self._give_up(_reason(error))
        return type(block).forward(block, *args, **kwargs)

    def _proves(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compile a kind of block, forward and backward; return whether outputs and gradients are the block's own."""
        before = _random_states(args, kwargs)
        # A backward is compiled when it is first called. Whatever its compiler raises here has not touched the run.
        try:
            started = time.perf_counter()
            # Numbers of a layer (its epsilon) are constants: traced as inputs first, they would be looked at twice.
            with torch._dynamo.config.patch(specialize_float=True):
                found = _both_ways(self._compiled, block, args, kwargs)
            seconds = time.perf_counter() - started
            _set_random_states(before, args, kwargs)
            expected = _both_ways(_forward, block, args, kwargs)
            drawn = any(not torch.equal(*pair) for pair in zip(before, _random_states(args, kwargs), strict=True))
        except Exception as error:  # noqa: BLE001 - a block that cannot compute at all says so again, as it stands
            self._give_up(_reason(error))
            return False
        finally:
            _set_random_states(before, args, kwargs)
        # Compiled dropout draws other numbers.
        for what, ours, theirs in zip(("outputs", "gradients"), found, expected, strict=True):
            if not drawn and (apart := _apart(ours, theirs)) is not None:
                self._give_up(f"its first {what} differ from the block's own by {apart:.1e} of their norm")
                return False
        if type(block) not in self._named:
            self._named.add(type(block))
            compared = (
                "drawing random numbers, it was not compared" if drawn else "its outputs and gradients are the block's own"
            )
            self._note(f"compile: {type(block).__name__} in {seconds:.1f} s, one graph for all of its kind; {compared}")
        return True

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


def _both_ways(
    call: Callable[..., Any], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]:
    """Compute a block's outputs, and the gradients of half their square, apart from the run's own graph.

    Returns:
        Groups of tensors to compare: each output, and the gradients of all inputs and of all weights.

    """
    args, kwargs = tree_map(_apart_from_graph, (args, kwargs))
    # Checkpointing keeps no tensors of the block, and would compute it again for these.
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        outputs = [tensor for tensor in _tensors(call(block, *args, **kwargs)) if tensor.is_floating_point()]
        learned = [tensor for tensor in outputs if tensor.requires_grad]
        inputs = [tensor for tensor in _tensors((args, kwargs)) if tensor.requires_grad]
        weights = [weight for weight in block.parameters() if weight.requires_grad]
        gradients: Sequence[torch.Tensor] = ()
        if learned and (inputs or weights):
            sides = [tensor.detach() for tensor in learned]
            gradients = torch.autograd.grad(learned, [*inputs, *weights], sides, materialize_grads=True)
    return [[tensor.detach()] for tensor in outputs], [list(gradients[: len(inputs)]), list(gradients[len(inputs) :])]


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _apart_from_graph(value: Any) -> Any:
    """Return a tensor without its history, any other value as it is."""
    # What learns nothing stays itself: attention finds what it knows of a row by the tensor that holds its bounds.
    return value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _apart(found: list[list[torch.Tensor]], expected: list[list[torch.Tensor]]) -> float | None:
    """Return how far groups of tensors are apart, over their norms; None within the tolerance."""
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        if not theirs:
            continue
        kind = theirs[0].device.type
        computed = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else theirs[0].dtype
        # Of all together: a gradient that is zero but for rounding (of a bias of keys) has no direction of its own.
        difference = _norm([one.float() - other.float() for one, other in zip(ours, theirs, strict=True)])
        relative = difference / max(_norm(theirs), 1e-30)
        # A number that is none is not within either.
        if not relative <= _TOLERANCE.get(computed, 3e-2):
            worst = max(worst, math.inf if math.isnan(relative) else relative)
    return worst or None


def _norm(tensors: list[torch.Tensor]) -> float:
    return math.hypot(*(float(tensor.float().norm()) for tensor in tensors))


def _reason(error: BaseException) -> str:
    inner = getattr(error, "inner_exception", error)
    return f"{type(inner).__name__}: {_first_line(inner)}"


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
