"""Descriptions of what each rank holds → who writes what."""

import itertools
import json
import math

import pytest
from hypothesis import given, strategies as st

from forge_dist import CheckpointError
from forge_dist.checkpoints._divide import Description, chosen, describe, divide, ordered_names
from forge_dist.checkpoints._plan import DTYPES, Piece


def divided(ranks):
    """The division of what the ranks hold, and what each of them writes; descriptions pass through JSON."""
    catalog = sorted(ranks[0])
    descriptions = [json.loads(json.dumps(describe(pieces, catalog))) for pieces in ranks]
    division = divide(catalog, [Description(*each) for each in descriptions])
    return division.tensors, [
        chosen(ordered_names(pieces, catalog), flags) for pieces, flags in zip(ranks, division.flags, strict=True)
    ]


@st.composite
def holdings(draw):
    """Tensors of up to three dimensions, cut along the first, each cut held by one rank or by several."""
    world_size = draw(st.integers(1, 5))
    ranks = [{} for _ in range(world_size)]
    for index in range(draw(st.integers(0, 6))):
        shape = draw(st.lists(st.integers(1, 7), max_size=3))
        dtype = draw(st.sampled_from(sorted(DTYPES)))
        cuts = [0, *sorted(draw(st.sets(st.integers(1, max(1, shape[0] - 1))))), shape[0]] if shape and shape[0] > 1 else None
        spans = list(itertools.pairwise(cuts)) if cuts else [None]
        for span in spans[:world_size] if cuts and len(spans) <= world_size else [None]:
            offsets = [span[0], *[0] * (len(shape) - 1)] if span else [0] * len(shape)
            sizes = [span[1] - span[0], *shape[1:]] if span else shape
            for rank in draw(st.sets(st.integers(0, world_size - 1), min_size=1)):
                if f"t{index}" not in ranks[rank]:
                    ranks[rank][f"t{index}"] = Piece(dtype, shape, offsets, sizes)
    return ranks


def complete(ranks):
    """Whether each tensor's distinct pieces add up to it."""
    pieces = {
        (name, tuple(piece.offsets), tuple(piece.sizes), tuple(piece.shape)) for rank in ranks for name, piece in rank.items()
    }
    names = {name for name, *_ in pieces}
    return all(
        sum(math.prod(sizes) for name, _, sizes, _ in pieces if name == wanted) == math.prod(shape)
        for wanted in names
        for shape in [next(shape for name, _, _, shape in pieces if name == wanted)]
    )


@given(holdings())
def test_every_piece_is_written_once_by_who_holds_it(ranks):
    """No piece is lost or written twice, no rank is asked for what it does not hold, and an incomplete tensor is refused."""
    if not complete(ranks):
        with pytest.raises(CheckpointError, match="together"):
            divided(ranks)
        return
    wholes, names = divided(ranks)
    written = [(name, tuple(chunk.offsets), tuple(chunk.sizes)) for name, whole in wholes.items() for chunk in whole.chunks]
    assert len(written) == len(set(written))
    assert set(written) == {(name, tuple(p.offsets), tuple(p.sizes)) for rank in ranks for name, p in rank.items()}
    for name, whole in wholes.items():
        for chunk in whole.chunks:
            assert ranks[chunk.rank][name].offsets == chunk.offsets
        assert whole.chunks == sorted(whole.chunks)
    for rank, own in enumerate(names):
        assert sorted(own) == [name for name, whole in wholes.items() if any(chunk.rank == rank for chunk in whole.chunks)]


def test_copies_are_shared_out():
    """What all ranks hold alike is written by all of them, each about its share of the bytes."""
    same = {f"layer{index}": Piece("F32", [100 + index], [0], [100 + index]) for index in range(40)}
    wholes, _ = divided([same] * 4)
    load = [0] * 4
    for whole in wholes.values():
        load[whole.chunks[0].rank] += whole.shape[0]
    assert max(load) - min(load) <= 139


def test_ranks_that_disagree_are_named():
    """One name with two shapes or formats is an error, and so is a tensor of which a part is nowhere."""
    with pytest.raises(CheckpointError, match=r"disagree about w: rank 1 has F32 \[3\], another F32 \[2\]"):
        divided([{"w": Piece("F32", [2], [0], [2])}, {"w": Piece("F32", [3], [0], [3])}])
    with pytest.raises(CheckpointError, match="disagree about w"):
        divided([{"w": Piece("F32", [2], [0], [2])}, {"w": Piece("BF16", [2], [0], [2])}])
    with pytest.raises(CheckpointError, match="3 values of w together, and it has 4"):
        divided([{"w": Piece("F32", [4], [0], [1])}, {"w": Piece("F32", [4], [2], [2])}])


def test_what_is_divided_alike_is_described_once():
    """Tensors of one shape share their chunks, and a description has a piece for each kind, not for each name."""
    ranks = [
        {f"layers.{n}.{key}": Piece("F32", [8, 4], [4 * rank, 0], [4, 4]) for n in range(50) for key in ("weight", "exp_avg")}
        for rank in range(2)
    ]
    assert len(describe(ranks[0], sorted(ranks[0])).kinds) == 1
    wholes, names = divided(ranks)
    assert len({id(whole.chunks) for whole in wholes.values()}) == 1
    assert names == [sorted(ranks[0])] * 2


def test_copies_of_shards_are_shared_out_beside_them():
    """Where some ranks have more to write that only they hold, the others write the copies."""
    own = {"only": Piece("F32", [1000], [0], [1000])}
    copies = {f"copy{index}": Piece("F32", [100], [0], [100]) for index in range(10)}
    _, names = divided([own | copies, copies])
    assert names == [["only"], sorted(copies)]
