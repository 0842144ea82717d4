"""Calls of torch's kernels → bytes held at the worst moment, and what they are for.

Every tensor that a kernel makes is seen by a dispatch mode, and its storage again when the last tensor on it is gone: what
autograd saves stays, a view costs nothing. So the sum is what an allocator would hold, whether or not the tensors have data.
"""

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import attrs
import torch

# Both are documented under these names: "Extending PyTorch" and "Fake tensor" in torch's manual.
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PARTS = ("weights", "unrounded", "gradients", "optimizer", "activations", "head", "cache", "kernels")
"""What tensors are for, in the order of a table."""

_aten = torch.ops.aten
_PRODUCTS = {
    **dict.fromkeys((_aten.mm.default, _aten.mm.out, _aten.bmm.default, _aten.bmm.out), 0),
    **dict.fromkeys((_aten.addmm.default, _aten.addmm.out, _aten.addmm_.default), 1),
    **dict.fromkeys((_aten.baddbmm.default, _aten.baddbmm.out, _aten.baddbmm_.default), 1),
}
"""Kernels that multiply two matrices → the place of the first among their arguments."""
_NEAR = 64 * 2**20
"""Bytes below the worst moment at which what a product takes for itself is not asked for: it takes less."""
Products = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Factors of matrix products, as tensors of their shapes, strides and dtypes on the meta device."""
_DEVICE = torch.ops.prim.device.default
"""Kernel that asks where a tensor is."""
_INDEXING = frozenset({_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default})
"""Kernels that take places, or a mask of them; how many a mask has must be known."""
_READS = frozenset({_aten._local_scalar_dense.default, _aten.equal.default, _aten.allclose.default})
"""Kernels that read a tensor's value, which one without data does not have."""


_AROUND_A_MODE = frozenset({"torch._compile", "torch._dynamo.eval_frame", "torch.utils._python_dispatch"})
"""Modules of torch between a kernel's caller and a dispatch mode."""


class Stage(NamedTuple):
    """Part of a step's work, between two marks."""

    kind: str
    """begin, forward, backward or optimizer."""
    block: int | None = None
    """Which of the model's repeated blocks; None for none."""
    time: int = 0
    """How many times that was there before."""


@attrs.frozen(kw_only=True)
class Peak:
    """Bytes held at the worst moment."""

    bytes: int
    parts: Mapping[str, int]
    """Name of `PARTS` → bytes of that, together `bytes`."""
    guesses: tuple[str, ...] = ()
    """Places outside of this package at which a value was needed that a tensor without data does not have."""
    stages: Mapping[Stage, Mapping[str, int]] = attrs.field(factory=dict, repr=False)
    """Stage of the work → the parts of its own worst moment, where the rehearsal was of fewer blocks than the model has."""
    shares: Mapping[str, int] = attrs.field(factory=dict, repr=False)
    """Part → how many ranks divide it; the moment is the worst for one of them, and its parts are whole."""

    def with_blocks(self, more: "Peak", *, fewer: int, blocks: int) -> "Peak | None":
        """Derive the worst moment with `blocks` equal blocks; None where the two did otherwise.

        What a stage holds grows by the same bytes with each block between the first and the last, so the stages near either end
        give the worst moment: between them it grows or falls evenly.

        Args:
            more: of the same work with one block more.
            fewer: blocks of this one, at least 3.
            blocks: those of the model.
        """
        found: list[dict[str, int]] = []
        last = {stage._replace(block=fewer) for stage in self.stages if stage.block == fewer - 1}
        if not last or set(more.stages) != set(self.stages) | last:
            return None
        for stage, parts in self.stages.items():
            # Counted from the first block, and from the last.
            others = [stage] if stage.block is None or stage.block < fewer - 1 else []
            if stage.block is not None and stage.block > 0:
                others.append(stage._replace(block=stage.block + 1))
            found += [
                {part: size + (blocks - fewer) * (more.stages[other][part] - size) for part, size in parts.items()}
                for other in others
            ]
        worst = max(found, key=lambda parts: sum(size / self.shares.get(part, 1) for part, size in parts.items()))
        return Peak(bytes=sum(worst.values()), parts=worst, guesses=self.guesses, shares=self.shares)


class Tracker(TorchDispatchMode):
    """Records what each kernel allocates, and when it is freed; a context manager.

    Args:
        allocated: bytes of a tensor → bytes that the device's allocator takes for them.
        scratch: products → the bytes that each takes for itself and gives back; None where they take none.
        check: called before each kernel; what it raises ends the work.
    """

    def __init__(
        self,
        allocated: Callable[[int], int] = int,
        scratch: Callable[[Products], Sequence[int]] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self._allocated, self._scratch, self._check = allocated, scratch, check
        self._products: list[tuple[int, tuple[Any, ...]]] = []
        """(number of allocations and releases before it, shapes, strides and dtype of its factors) of each product."""
        self._events: list[tuple[int, int]] = []
        """(storage's number, bytes; less than 0 where they are freed)."""
        self._part_of: dict[int, str] = {}
        self._known: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._weights: set[torch.Size] = set()
        """Shapes of the matrices that a model has."""
        self._part = "activations"
        self._guesses: dict[str, None] = {}
        self._stages: list[tuple[int, Stage]] = []
        """(number of allocations and releases before it, what begins there)."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor) and not args[0].fake_mode.in_kernel_invocation:
            # Two thirds of all calls; torch would give the same answer, after several times the work.
            return args[0].fake_device
        if self._check is not None:
            self._check()
        if func in _READS and any(isinstance(each, torch.Tensor) and _empty(each) for each in args):
            return self._guess(None if func is not _aten._local_scalar_dense.default else args[0])
        if func is _aten.add.Tensor and self._sums_gradients(args):
            return args[0]
        if func in _INDEXING:
            args = _with_places(args)
        if func is _aten._grouped_mm.default and isinstance(args[0], FakeTensor):
            made = _grouped_product(*args, **(kwargs or {}))
        else:
            made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, torch.Tensor):
                self._see(each)
        if self._scratch is not None and (first := _PRODUCTS.get(func)) is not None:
            factors = args[first], args[first + 1]
            self._products.append((len(self._events), tuple((f.shape, f.stride(), f.dtype) for f in factors)))
        return made

    def hold(self, tensors: Iterable[torch.Tensor], part: str) -> None:
        """Count tensors that were there before."""
        for tensor in tensors:
            self._see(tensor, part)
            if part == "weights" and tensor.dim() > 1:
                self._weights.add(tensor.shape)

    def hold_elsewhere(self, tensors: Iterable[torch.Tensor]) -> None:
        """Let tensors be known that take no bytes of their own."""
        for tensor in tensors:
            number = len(self._part_of)
            self._known[tensor.untyped_storage()] = number
            self._part_of[number] = "weights"

    def mark(self, tensor: torch.Tensor, part: str) -> None:
        """Say what a tensor is for, from its allocation on."""
        self._see(tensor, part)
        self._part_of[self._known[tensor.untyped_storage()]] = part

    @contextmanager
    def counting(self, part: str) -> Iterator[None]:
        """Count what is allocated inside the block as `part`."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def begin(self, part: str) -> str:
        """Count what is allocated from now on as `part`; return what it was counted as before."""
        before, self._part = self._part, part
        return before

    def enter(self, kind: str, block: int | None = None) -> None:
        """Let a stage of the work begin, whose worst moment is wanted by itself."""
        time = sum(stage.kind == kind and stage.block == block for _, stage in self._stages)
        self._stages.append((len(self._events), Stage(kind, block, time)))

    @property
    def position(self) -> int:
        """Number of allocations and releases so far."""
        return len(self._events)

    def peak(
        self,
        since: int = 0,
        *,
        always: Mapping[str, int] | None = None,
        library_bytes: int = 0,
        shares: Mapping[str, int] | None = None,
    ) -> Peak:
        """Return the worst moment after the first `since` allocations and releases.

        Args:
            since: a former `position`.
            always: parts that have buffers of their own at all times, with their bytes, which count in the place of tensors.
            library_bytes: what kernels hold at all times, beside what each takes for itself.
            shares: part → how many ranks divide it; the worst moment is that of one of them.
        """
        always, shares = always or {}, {part: ranks for part, ranks in (shares or {}).items() if ranks > 1}
        held = most = sum(always.values())
        at = -1
        moments = []
        for index, (storage, number) in enumerate(self._events):
            part = self._part_of[storage]
            held += 0 if part in always else number / shares[part] if part in shares else number
            moments.append(held)
            if index >= since and held > most:
                most, at = held, index
        kernels = 0
        for index, size in self._product_scratch(moments, max(1, since), most - _NEAR):
            if moments[index] + size > most:
                most, at, kernels = moments[index] + size, index, size
        own = self._of_stages(moments, max(1, since))
        worst, *stages = self._parts_at([at, *(index for _, index, _ in own)])
        parts = worst | {**always, "kernels": kernels + library_bytes}
        return Peak(
            bytes=sum(parts.values()),
            parts=parts,
            guesses=tuple(self._guesses),
            stages={
                stage: found | {**always, "kernels": size + library_bytes}
                for (stage, _, size), found in zip(own, stages, strict=True)
            },
            shares=shares,
        )

    def _of_stages(self, moments: Sequence[float], since: int) -> list[tuple[Stage, int, int]]:
        """Return each stage after `since` events, with its worst moment.

        That is an event, and the bytes that a product takes there for itself.
        """
        began = [(max(since, count), stage) for count, stage in self._stages if count >= since]
        if not self._stages:
            return []
        began.insert(0, (since, Stage("begin")))
        ends = [count for count, _ in began[1:]] + [len(moments)]
        found = []
        for (begin, stage), end in zip(began, ends, strict=True):
            # What is held as a stage begins counts to it.
            inside = range(begin - 1, max(begin, end))
            at, size = max(inside, key=moments.__getitem__), 0
            for index, more in self._product_scratch(moments, begin, moments[at] - _NEAR, until=end):
                if moments[index] + more > moments[at] + size:
                    at, size = index, more
            found.append((stage, at, size))
        return found

    def _parts_at(self, events: Sequence[int]) -> list[dict[str, int]]:
        """Return what is held after each of these events, by what it is for."""
        held, seen, wanted = dict.fromkeys(PARTS, 0), {-1: dict.fromkeys(PARTS, 0)}, set(events)
        for index, (storage, number) in enumerate(self._events):
            held[self._part_of[storage]] += number
            if index in wanted:
                seen[index] = dict(held)
        return [seen[index] for index in events]

    def _product_scratch(
        self, moments: Sequence[float], since: int, least: float, until: int | None = None
    ) -> list[tuple[int, int]]:
        """Return (event, bytes) of the products that began with at least so many bytes held."""
        near = [
            (count - 1, key)
            for count, key in self._products
            if count > since and (until is None or count <= until) and moments[count - 1] >= least
        ]
        if self._scratch is None or not near:
            return []
        keys = list(dict.fromkeys(key for _, key in near))
        sizes = dict(zip(keys, self._scratch([(_factor(*first), _factor(*second)) for first, second in keys]), strict=True))
        return [(index, sizes[key]) for index, key in near]

    def _see(self, tensor: torch.Tensor, part: str | None = None) -> None:
        if type(tensor) is not torch.Tensor and not isinstance(tensor, FakeTensor | torch.nn.Parameter):
            return  # a wrapper around tensors that are seen themselves
        storage = tensor.untyped_storage()
        if storage in self._known:
            return
        number, size = len(self._part_of), self._allocated(storage.nbytes())
        self._known[storage] = number
        self._part_of[number] = part or self._part
        self._events.append((number, size))
        freed: Any = weakref.finalize(storage, self._events.append, (number, -size))
        freed.atexit = False

    def _sums_gradients(self, args: tuple[Any, ...]) -> bool:
        """Return whether autograd adds up two gradients of one weight, such as a tied embedding.

        It does so in place, but out of place where a tensor has no data.
        """
        first, second = args[:2]
        if not (_empty_tensor(first) and _empty_tensor(second)) or torch.is_grad_enabled():
            return False
        if first.shape != second.shape or first.shape not in self._weights:
            return False
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _AROUND_A_MODE:
            frame = frame.f_back
        return frame.f_globals.get("__name__") == "torch.autograd.graph"

    def _guess(self, tensor: torch.Tensor | None) -> Any:
        """Answer for a value that is not there: 1, or True."""
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "contextlib"):
            frame = frame.f_back
        name = str(frame.f_globals.get("__name__", "?"))
        if name.partition(".")[0] != __name__.partition(".")[0]:
            self._guesses[f"{name}:{frame.f_lineno}"] = None
        return True if tensor is None or tensor.dtype == torch.bool else 1.0 if tensor.is_floating_point() else 1


def _factor(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def _empty(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has no data."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _empty_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and _empty(value)


def _with_places(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of an indexing kernel with places for each mask that has data."""
    return args[0], [place for index in args[1] for place in _places(index)], *args[2:]


def _places(index: Any) -> tuple[Any, ...]:
    """Return the places where a mask with data is True; of any other index, that itself."""
    masks = isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8) and not _empty(index)
    return index.nonzero(as_tuple=True) if masks else (index,)


def _grouped_product(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, bias: Any = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Make the output of torch's grouped product, whose own rule knows bfloat16 alone."""
    del bias
    groups: tuple[int, ...] = ()
    if a.dim() == b.dim() == 3:
        groups = (len(a),)
    elif a.dim() == b.dim() == 2 and offs is not None:
        groups = (len(offs),)
    return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype)
