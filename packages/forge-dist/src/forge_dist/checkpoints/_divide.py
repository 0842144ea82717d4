"""Division of a save: what each rank holds, described shortly → which one writes what.

R ranks of a model of N tensors hold R × N pieces, but a rank's pieces are of few kinds (dtype, shape, place), and most tensors
are divided like another. So a description is a table of kinds and a number for each name, and each way of dividing is looked at
once. Pieces that several ranks hold are written by the one that has the least to write so far.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import attrs

from forge_dist._errors import CheckpointError
from forge_dist.checkpoints._plan import DTYPES, Chunk, Piece, StoredTensor

_NOTHING = -1
_WRITES, _LEAVES = b"10"


class Description(NamedTuple):
    """What one rank holds, as JSON has it.

    The catalog is the first rank's names, which all ranks know.
    """

    kinds: list[Piece]
    """Distinct pieces of this rank."""
    places: list[int]
    """For each name of the catalog: the number of its piece in `kinds`; -1 where the rank holds nothing of it."""
    extra: dict[str, int]
    """Name that is not in the catalog → the number of its piece, sorted by name."""


class Division(NamedTuple):
    """Who writes what."""

    tensors: dict[str, StoredTensor]
    """Name → its chunks, sorted; tensors that are divided alike share one list of chunks."""
    flags: list[str]
    """By rank: "1" for each name that it writes, "0" for each other, in the order of `ordered_names`."""


def describe(pieces: Mapping[str, Piece], catalog: Sequence[str]) -> Description:
    """Describe the pieces of this rank.

    >>> piece = Piece("F32", [4], [0], [2])
    >>> describe({"a": piece, "b": piece, "mine": Piece("U8", [1], [0], [1])}, ["a", "b", "c"])[1:]
    ([0, 0, -1], {'mine': 1})
    """
    numbers: dict[_Key, int] = {}

    def number(piece: Piece) -> int:
        return numbers.setdefault(_key(piece), len(numbers))

    places = [number(pieces[name]) if name in pieces else _NOTHING for name in catalog]
    extra = {name: number(pieces[name]) for name in _extra_names(pieces, catalog)}
    kinds = [Piece(dtype, list(shape), list(offsets), list(sizes)) for dtype, shape, offsets, sizes in numbers]
    return Description(kinds, places, extra)


def ordered_names(pieces: Mapping[str, Piece], catalog: Sequence[str]) -> list[str]:
    """Return the catalog and after it this rank's other names: the order of its flags."""
    return [*catalog, *_extra_names(pieces, catalog)]


def chosen(names: Sequence[str], flags: str) -> list[str]:
    """Return the names that a rank writes."""
    return [name for name, flag in zip(names, flags, strict=True) if flag == "1"]


def divide(catalog: Sequence[str], descriptions: Sequence[Description]) -> Division:
    """Divide the pieces of all ranks into chunks to write.

    Raises:
        CheckpointError: ranks disagree about a tensor, or do not hold all of it together.
    """
    kinds = [[_key(piece) for piece in each.kinds] for each in descriptions]
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank, each in enumerate(descriptions):
        alike.setdefault(tuple(each.places), []).append(rank)
    layouts: dict[object, _Layout] = {}
    layout_of: dict[str, _Layout] = {}
    for name, numbers in zip(catalog, zip(*alike, strict=True), strict=True):
        if numbers not in layouts:
            held = ((rank, number) for number, ranks in zip(numbers, alike.values(), strict=True) for rank in ranks)
            layouts[numbers] = _Layout.of(name, held, kinds)
        layout_of[name] = layouts[numbers]
    holders: dict[str, list[tuple[int, int]]] = {}
    for rank, each in enumerate(descriptions):
        for name, number in each.extra.items():
            holders.setdefault(name, []).append((rank, number))
    layout_of |= {name: _Layout.of(name, held, kinds) for name, held in holders.items()}
    chunks = _assign(layout_of, len(descriptions))
    tensors = {name: StoredTensor(layout.dtype, list(layout.shape), chunks[name]) for name, layout in sorted(layout_of.items())}
    return Division(tensors, _flags(catalog, descriptions, alike, layout_of, chunks))


_Where = tuple[tuple[int, ...], tuple[int, ...]]  # offsets and sizes of a piece
_Key = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _key(piece: Piece) -> _Key:
    return piece[0], tuple(piece[1]), tuple(piece[2]), tuple(piece[3])


def _extra_names(pieces: Mapping[str, Piece], catalog: Sequence[str]) -> list[str]:
    return sorted(pieces.keys() - set(catalog))


@attrs.frozen(eq=False)
class _Layout:
    """One way in which tensors lie over the ranks."""

    dtype: str
    shape: tuple[int, ...]
    holders: dict[_Where, tuple[int, ...]]
    """Where a piece lies → the ranks that hold it, sorted."""

    @property
    def is_exclusive(self) -> bool:
        """Whether each piece has one holder, so that nothing is to be chosen."""
        return all(len(ranks) == 1 for ranks in self.holders.values())

    def size_of(self, where: _Where) -> int:
        """Return the bytes of a piece."""
        return math.prod(where[1]) * DTYPES[self.dtype].itemsize

    def chunks(self) -> list[Chunk]:
        """Return the chunks, each written by the first of those that hold it."""
        return [Chunk(list(offsets), list(sizes), ranks[0]) for (offsets, sizes), ranks in self.holders.items()]

    @staticmethod
    def of(name: str, held: Iterable[tuple[int, int]], kinds: Sequence[Sequence[_Key]]) -> "_Layout":
        """Return the layout of the tensor `name`, of which (rank, number of its piece) are held.

        Raises:
            CheckpointError: as `divide`.
        """
        dtype, shape = "", ()
        holders: dict[_Where, list[int]] = {}
        for rank, number in held:
            if number == _NOTHING:
                continue
            own_dtype, own_shape, offsets, sizes = kinds[rank][number]
            if not holders:
                dtype, shape = own_dtype, own_shape
            if (own_dtype, own_shape) != (dtype, shape):
                raise CheckpointError(
                    f"ranks disagree about {name}: rank {rank} has {own_dtype} {list(own_shape)}, another {dtype} {list(shape)}"
                )
            holders.setdefault((offsets, sizes), []).append(rank)
        present = sum(math.prod(sizes) for _, sizes in holders)
        if present != math.prod(shape):
            raise CheckpointError(
                f"the ranks hold {present} values of {name} together, and it has {math.prod(shape)} {list(shape)}"
            )
        return _Layout(dtype, shape, {where: tuple(ranks) for where, ranks in sorted(holders.items())})


def _assign(layout_of: Mapping[str, _Layout], world_size: int) -> dict[str, list[Chunk]]:
    """Choose the rank that writes each piece: name → its chunks."""
    load = [0] * world_size
    chunks: dict[str, list[Chunk]] = {}
    contested: list[tuple[int, str, _Where]] = []
    shared = {layout: layout.chunks() for layout in set(layout_of.values()) if layout.is_exclusive}
    for name, layout in layout_of.items():
        chunks[name] = shared.get(layout, [])
        if layout not in shared:
            contested += [(-layout.size_of(where), name, where) for where in layout.holders]
    for layout, tensors in Counter(layout_of.values()).items():
        for where, ranks in layout.holders.items() if layout in shared else ():
            load[ranks[0]] += tensors * layout.size_of(where)
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    # The largest first, so that the small ones balance the ranks.
    for size, name, where in sorted(contested):
        ranks = layout_of[name].holders[where]
        heap = heaps.setdefault(ranks, [])
        if not heap:
            heap += [(load[rank], rank) for rank in ranks]
            heapq.heapify(heap)
        while heap[0][0] != load[heap[0][1]]:  # it was given pieces that other ranks hold
            heapq.heapreplace(heap, (load[heap[0][1]], heap[0][1]))
        rank = heap[0][1]
        load[rank] -= size
        heapq.heapreplace(heap, (load[rank], rank))
        chunks[name].append(Chunk(list(where[0]), list(where[1]), rank))
    for name in {name for _, name, _ in contested}:
        chunks[name].sort()
    return chunks


def _flags(
    catalog: Sequence[str],
    descriptions: Sequence[Description],
    alike: Mapping[tuple[int, ...], Sequence[int]],
    layout_of: Mapping[str, _Layout],
    chunks: Mapping[str, list[Chunk]],
) -> list[str]:
    exclusive = {layout: layout.is_exclusive for layout in set(layout_of.values())}
    alone = [exclusive[layout_of[name]] for name in catalog]
    flags = [bytearray() for _ in descriptions]
    for numbers, ranks in alike.items():
        writes = bytes(
            _WRITES if number != _NOTHING and owned else _LEAVES for number, owned in zip(numbers, alone, strict=True)
        )
        for rank in ranks:
            flags[rank] += writes + bytes(
                _WRITES if exclusive[layout_of[name]] else _LEAVES for name in descriptions[rank].extra
            )
    position = {name: index for index, name in enumerate(catalog)}
    extra = [{name: len(catalog) + index for index, name in enumerate(each.extra)} for each in descriptions]
    for name, layout in layout_of.items():
        if not exclusive[layout]:
            for chunk in chunks[name]:
                flags[chunk.rank][position[name] if name in position else extra[chunk.rank][name]] = _WRITES
    return [each.decode() for each in flags]
