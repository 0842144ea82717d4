"""divide: one step over ranks and micro-batches."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_packing import PackingError, divide, pack_rows


@st.composite
def cases(draw):
    max_tokens = draw(st.integers(1, 80))
    lengths = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=40))
    return lengths, max_tokens, draw(st.integers(1, 9))


@settings(deadline=None, max_examples=1000)
@given(cases())
def test_laws_of_a_division(case):
    """Exact partition, budget, equal counts, ascending indices, and the number that best-fit decreasing needs."""
    lengths, max_tokens, world_size = case
    ranks = divide(lengths, max_tokens=max_tokens, world_size=world_size)
    assert len(ranks) == world_size
    needed = -(-len(pack_rows(lengths, max_tokens)) // world_size)
    assert {len(rank) for rank in ranks} == {needed}
    everything = [micro_batch for rank in ranks for micro_batch in rank]
    assert sorted(np.concatenate(everything).tolist()) == list(range(len(lengths)))
    for micro_batch in everything:
        assert micro_batch.dtype == np.int64
        assert np.asarray(lengths)[micro_batch].sum() <= max_tokens
        assert (np.diff(micro_batch) > 0).all()


@settings(deadline=None, max_examples=300)
@given(cases())
def test_similar_loads_side_by_side(case):
    """The heaviest micro-batch of a pass is never heavier than the lightest of the pass before."""
    lengths, max_tokens, world_size = case
    ranks = divide(lengths, max_tokens=max_tokens, world_size=world_size)
    loads = np.array([[np.asarray(lengths)[micro_batch].sum() for micro_batch in rank] for rank in ranks])
    assert (loads[:, 1:].max(axis=0) <= loads[:, :-1].min(axis=0)).all()


@settings(deadline=None, max_examples=300)
@given(cases())
def test_deterministic(case):
    """The same lengths give the same arrays, as a list or as an array of another integer type."""
    lengths, max_tokens, world_size = case
    first = divide(lengths, max_tokens=max_tokens, world_size=world_size)
    again = divide(np.array(lengths, dtype=np.uint16), max_tokens=np.int32(max_tokens), world_size=world_size)
    assert [[m.tolist() for m in rank] for rank in first] == [[m.tolist() for m in rank] for rank in again]


def test_a_small_step_uses_every_rank():
    """Samples that one micro-batch could hold are spread: no rank idles while another does all the work."""
    ranks = divide([10] * 8, max_tokens=1000, world_size=4)
    assert [len(rank[0]) for rank in ranks] == [2, 2, 2, 2]


def test_fewer_samples_than_ranks():
    """A rank without work gets an empty int64 micro-batch."""
    ranks = divide([5, 4], max_tokens=9, world_size=3)
    assert [[m.tolist() for m in rank] for rank in ranks] == [[[0]], [[1]], [[]]]
    assert ranks[2][0].dtype == np.int64


def test_tight_fit_falls_back_on_best_fit():
    """Where an even spread breaks the budget the rows of best-fit decreasing stand."""
    # Always to the emptier rank: 5+3 and 4+3, and no room for the last 3. Best fit: 5+4 and 3+3+3.
    ranks = divide([5, 4, 3, 3, 3], max_tokens=9, world_size=2)
    assert [[m.tolist() for m in rank] for rank in ranks] == [[[0, 1]], [[2, 3, 4]]]
    # The same on three ranks with a spare one: what does not fit evenly into two leaves none empty in three.
    ranks = divide([5, 4, 3, 3, 3], max_tokens=9, world_size=3)
    assert [[m.tolist() for m in rank] for rank in ranks] == [[[1, 4]], [[2, 3]], [[0]]]


def test_an_even_spread_may_fill_to_the_last_token():
    """A spread that uses the whole budget is within it (best fit would put 5+5 beside 4+3+2+1)."""
    ranks = divide([5, 5, 4, 3, 2, 1], max_tokens=10, world_size=2)
    assert [[m.tolist() for m in rank] for rank in ranks] == [[[0, 2, 5]], [[1, 3, 4]]]


def test_51_49_on_eight_ranks():
    """Sixteen halves make one micro-batch on each of eight ranks."""
    assert [len(rank) for rank in divide([51] * 8 + [49] * 8, max_tokens=100, world_size=8)] == [1] * 8


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lengths": []}, "lengths is empty"),
        ({"world_size": 0}, "world_size must be an integer of at least 1, got 0"),
        ({"max_tokens": 0}, "max_tokens must be an integer from 1 to 2147483647, got 0"),
        ({"lengths": [1, 99, 98]}, r"sample 1 has 99 tokens, more than max_tokens=10 \(and 1 more like it\).*at least 99"),
    ],
)
def test_refuses(arguments, message):
    """Bad input is a PackingError that names the value and the limit."""
    with pytest.raises(PackingError, match=message):
        divide(**{"lengths": [1, 2], "max_tokens": 10, **arguments})
