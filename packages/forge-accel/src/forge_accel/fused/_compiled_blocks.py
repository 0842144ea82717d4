"""Repeated blocks of a model → the same, compiled once for all (regional compilation).

All blocks of a kind share one graph, whose rows have any length: nothing is compiled anew when the row size changes. Hooks
around a block, which gather and free its weights, stay outside of the graph; so do names of parameters. Only training is
compiled: a forward without gradients, or in evaluation mode, is the block's own. So is that of a block whose layers have hooks:
torch's compiler leaves out those that come after it, and a trial would call them more often than the run does. A block whose
layers are replaced is tried anew. Copies of a model, deep ones and pickled ones, are not compiled.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules import module as nn_module
from torch.utils._pytree import tree_leaves, tree_map

from forge_accel.fused._replaced_forward import ReplacedForward, may_replace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import nn

_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8, torch.bfloat16: 3e-2, torch.float16: 5e-3}
"""Most difference between a block's outputs or gradients, compiled and not, over their norm."""

_HOOKS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
"""Hooks of a module, and of all, that run within the forward and backward of what contains it."""

_GRAPHS = 32
"""Graphs that the blocks of a model may have, of which torch allows 8: with LoRA those of Gemma 3 have 10.

Rows share prefixes or not, their longest sample outgrows the window or not, and the first block's input has no gradient.
"""

_Groups = tuple[list[list[torch.Tensor]], list[list[torch.Tensor]]]
"""Outputs and gradients of a block, in groups that are compared together."""


class CompiledBlocks:
    """Blocks of a model whose training forwards run compiled; `remove()` undoes it.

    Before the first training forward of each block, forward and backward are made both ways and compared. What cannot
    be compiled as one graph, or does not give the same outputs and gradients, runs as it stands from then on, and so does what
    was not tried yet; `problem` says why: a run does not end for that. Where there are several ranks, `agree` makes the answer
    the same on all.

    Args:
        blocks: Modules that a model repeats, each called once a forward. Ranks that compute one together, exchanging numbers
            within its forward, would wait for each other where a compiler fails on one of them.
        backend: Backend of `torch.compile`: `inductor`, or a function that takes a graph.
        note: Called with a line for the log, when a kind of block has been compiled and where it cannot be.
        own_hooks: Whether hooks that layers within the blocks have now are the caller's own, which compute and keep nothing:
            they are compiled with the layers. A block whose layers have others runs as it stands while they have them.

    """

    problem: str | None = None
    """Reason for which no further block is compiled; None while there is none."""

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        *,
        backend: str | Callable[..., Any] = "inductor",
        note: Callable[[str], None] = lambda _: None,
        own_hooks: bool = False,
    ) -> None:
        self._note, self._proven, self._named = note, set[tuple[int, tuple[bool, ...]]](), set[type]()
        self._hooked = False
        # torch keeps graphs by code object, and limits how many one may have: each model's blocks get one of their own.
        own = FunctionType(_forward.__code__.replace(), globals(), "block")
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _GRAPHS)
        self._compiled = torch.compile(own, backend=backend, fullgraph=True, dynamic=True)
        self.blocks = [_CompiledForward(block, self, own_hooks=own_hooks) for block in blocks if may_replace(block)]
        for block in self.blocks:
            block.install()

    def remove(self) -> None:
        """Let the blocks compute by their classes' forwards."""
        for block in self.blocks:
            block.remove()

    def agree(self, of_all: Callable[[str | None], str | None]) -> None:
        """Let the blocks of all ranks run compiled, or those of none.

        Ranks call it together, between two steps, once blocks were tried. Until then each decides by itself, which changes its
        numbers by no more than rounding.

        Args:
            of_all: This rank's `problem` → one of all ranks' problems, the same on each; None where no rank has one.

        """
        if (why := of_all(self.problem)) is None:
            return
        self._proven.clear()
        self._give_up(why)

    def run(self, forward: _CompiledForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a block's forward in its graph; by the block itself where that is not possible."""
        block = forward.module
        # Each block, for one of the same class may have a graph of its own: other layers, a window, frozen weights.
        call = id(block), tuple(tensor.requires_grad for tensor in _tensors((args, kwargs)))
        try:
            if self._is_compiled(forward, call, args, kwargs):
                return self._compiled(block, *args, **kwargs)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            self._proven.discard(call)
            self._give_up(_reason(error), what="a block runs")
        return type(block).forward(block, *args, **kwargs)

    def _is_compiled(
        self,
        forward: _CompiledForward,
        call: tuple[int, tuple[bool, ...]],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> bool:
        """Return whether a block's forward runs compiled; it is tried when it is first called so."""
        # A block that was proven before another failed stays compiled: checkpointing computes it again as it was.
        if forward.has_other_layers():
            self._proven = {(block, learns) for block, learns in self._proven if block != id(forward.module)}
        known = call in self._proven
        if not known and self.problem is not None:
            return False
        if (hook := forward.hook()) is not None:
            self._note_hook(type(forward.module).__name__, hook)
            return False
        if not known and self._proves(forward.module, args, kwargs):
            self._proven.add(call)
        return call in self._proven

    def _note_hook(self, block: str, hook: str) -> None:
        if not self._hooked:
            self._hooked = True
            self._note(
                f"WARNING: compile: {block} runs uncompiled while its layers have hooks ({hook}): the compiler would leave out "
                "one that comes later, and trying the block would call each more often than the run does"
            )

    def _proves(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compile a block both ways; return whether outputs and gradients are the block's own."""
        before = _random_states(args, kwargs)
        buffers = [buffer.detach().clone() for buffer in block.buffers()]
        # A backward is compiled when it is first called. Whatever its compiler raises here has not touched the run.
        try:
            started = time.perf_counter()
            # Numbers of a layer (its epsilon) are constants: traced as inputs first, they would be looked at twice.
            with torch._dynamo.config.patch(specialize_float=True):
                found = _both_ways(self._compiled, block, args, kwargs)
            seconds = time.perf_counter() - started
            _set_random_states(before, args, kwargs)
            _set_buffers(block, buffers)
            expected = _both_ways(_forward, block, args, kwargs)
            drawn = any(not torch.equal(*pair) for pair in zip(before, _random_states(args, kwargs), strict=True))
            # Compiled dropout draws other numbers.
            problem = None if drawn else _difference(found, expected, _tolerance(block, args, kwargs))
        except Exception as error:  # noqa: BLE001 - a block that cannot compute at all says so again, as it stands
            if (ending := _ending(error)) is not None:
                raise ending from None
            self._give_up(_reason(error))
            return False
        finally:
            _set_random_states(before, args, kwargs)
            _set_buffers(block, buffers)
        if problem is not None:
            self._give_up(problem)
            return False
        if type(block) not in self._named:
            self._named.add(type(block))
            same = "its outputs and gradients are the block's own"
            compared = "drawing random numbers, it was not compared" if drawn else same
            self._note(f"compile: {type(block).__name__} in {seconds:.1f} s, one graph for all of its kind; {compared}")
        return True

    def _give_up(self, why: str, *, what: str = "the blocks run") -> None:
        if self.problem is None:
            self.problem = why
            self._note(f"WARNING: compile: {what} uncompiled: {why}")


class _CompiledForward(ReplacedForward):
    """Forward of one block: compiled while it trains."""

    def __init__(self, block: nn.Module, shared: CompiledBlocks, *, own_hooks: bool) -> None:
        super().__init__(block)
        self._shared = shared
        self._look()
        self._own = {key for _, table in self._tables for key in table} if own_hooks else set[int]()

    def _look(self) -> None:
        """Find the layers in the block, and where their hooks are kept."""
        layers = list(self.module.named_modules())
        self._tables = [(name, table) for name, layer in layers if name for table in _tables(layer)]
        self._tables += [("all modules", table) for table in _tables(nn_module, "_global_")]
        self._all = [table for _, table in self._tables]
        parts = [layer._modules for _, layer in layers]
        self._empty = [part for part in parts if not part]
        self._parts = [(part, list(part.values())) for part in parts if part]

    def has_other_layers(self) -> bool:
        """Return whether layers in the block were replaced, added or removed since the last call."""
        # Nearly never, and asked in each forward.
        if not any(self._empty) and all(list(part.values()) == layers for part, layers in self._parts):
            return False
        self._look()
        return True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the block's forward."""
        if self.module.training and torch.is_grad_enabled():
            return self._shared.run(self, args, kwargs)
        return super().__call__(*args, **kwargs)

    def hook(self) -> str | None:
        """Name a hook, not the caller's own, of a layer in the block; None without."""
        if not any(self._all):
            return None  # nearly always, and asked in each forward
        for name, table in self._tables:
            if table and (others := table.keys() - self._own):
                hook = table[min(others)]
                return f"{getattr(hook, '__qualname__', type(hook).__name__)} of {name}"
        return None


def _tables(owner: Any, prefix: str = "_") -> Iterator[dict[int, Any]]:
    """Yield the tables in which a module, or torch for all of them, keeps its hooks."""
    for name in _HOOKS:
        if (table := getattr(owner, f"{prefix}{name}", None)) is not None:
            yield table


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a block's forward without its hooks."""
    return type(block).forward(block, *args, **kwargs)


def _both_ways(call: Callable[..., Any], block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Groups:
    """Compute a block's outputs and the gradients of half their square, in a graph apart.

    Returns:
        Groups of tensors to compare: each output, and the gradients of all inputs and of all weights.

    """
    own: dict[int, torch.Tensor] = {}  # a tensor that is given twice stays one

    def apart(value: Any) -> Any:
        # What learns nothing stays itself: attention finds what it knows of a row by the tensor that holds its bounds.
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return value
        return own.setdefault(id(value), value.detach().requires_grad_())

    args, kwargs = tree_map(apart, (args, kwargs))
    # Checkpointing keeps no tensors of the block, and would compute it again for these.
    with _without_hooks(block), torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        outputs = [tensor for tensor in _tensors(call(block, *args, **kwargs)) if tensor.is_floating_point()]
        learned = [tensor for tensor in outputs if tensor.requires_grad]
        inputs = list(own.values())
        weights = [weight for weight in block.parameters() if weight.requires_grad]
        gradients: Sequence[torch.Tensor] = ()
        if learned and (inputs or weights):
            sides = [tensor.detach() for tensor in learned]
            gradients = torch.autograd.grad(learned, [*inputs, *weights], sides, materialize_grads=True)
    return [[tensor.detach()] for tensor in outputs], [list(gradients[: len(inputs)]), list(gradients[len(inputs) :])]


@contextmanager
def _without_hooks(block: nn.Module) -> Iterator[None]:
    """Take away the hooks on gradients of a block's weights, which are for those of the run."""
    hooks = [(weight, weight._backward_hooks) for weight in block.parameters() if weight._backward_hooks]
    try:
        for weight, _ in hooks:
            weight._backward_hooks = None
        yield
    finally:
        for weight, own in hooks:
            weight._backward_hooks = own


def _itself(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _difference(found: _Groups, expected: _Groups, tolerance: float) -> str | None:
    """Say what differs by more than the tolerance; None where nothing does."""
    for what, ours, theirs in zip(("outputs", "gradients"), found, expected, strict=True):
        if list(map(_shapes, ours)) != list(map(_shapes, theirs)):
            return f"its first {what} are others than the block's own"
        # Of a group together: a gradient that is zero but for rounding (of a bias of keys) has no direction of its own.
        for our_group, their_group in zip(ours, theirs, strict=True):
            apart = [float((one.float() - other.float()).norm()) for one, other in zip(our_group, their_group, strict=True)]
            relative = math.hypot(*apart) / max(_norm(their_group), 1e-30)
            # A number that is none is not within either.
            if not relative <= tolerance:
                return f"its first {what} differ from the block's own by {relative:.1e} of their norm"
    return None


def _tolerance(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    """Return the tolerance of the coarsest dtype that a block computes with."""
    tensors = [tensor for tensor in (*_tensors((args, kwargs)), *block.parameters()) if tensor.is_floating_point()]
    kinds = {tensor.device.type for tensor in tensors} - {"meta"}
    dtypes = {tensor.dtype for tensor in tensors}
    dtypes |= {torch.get_autocast_dtype(kind) for kind in kinds if torch.is_autocast_enabled(kind)}
    return max((_TOLERANCE.get(dtype, 3e-2) for dtype in dtypes), default=3e-2)


def _shapes(tensors: list[torch.Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in tensors]


def _set_buffers(block: nn.Module, values: list[torch.Tensor]) -> None:
    """Undo what a forward changed in a block's buffers, as running means are."""
    with torch.no_grad():
        for buffer, value in zip(block.buffers(), values, strict=True):
            if not torch.equal(buffer, value):
                buffer.copy_(value)


def _ending(error: BaseException) -> BaseException | None:
    """Return the error, one with an exit status, by which somebody else ends the run."""
    link: BaseException | None = error
    seen: set[int] = set()  # an error may be the cause of its own cause
    while link is not None and id(link) not in seen:
        if getattr(link, "exit_status", None) is not None:
            return link
        seen.add(id(link))
        link = getattr(link, "inner_exception", None) or link.__cause__
    return None


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
