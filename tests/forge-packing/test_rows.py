"""pack_rows: exact, within budget, close to the optimum."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_packing import PackingError, pack_rows


def optimum(lengths, capacity):
    """The least number of rows, by trying every placement (of rows with equal loads only one): the slow twin."""
    best = len(lengths)

    def place(index, loads):
        nonlocal best
        if len(loads) >= best:
            return
        if index == len(lengths):
            best = len(loads)
            return
        for load in {load for load in loads if load + lengths[index] <= capacity}:
            rest = list(loads)
            rest.remove(load)
            place(index + 1, [*rest, load + lengths[index]])
        place(index + 1, [*loads, lengths[index]])

    place(0, [])
    return best


def naive_best_fit_decreasing(lengths, capacity):
    """Quadratic best-fit decreasing, as in the textbook: the row with the least space that still fits, else a new one."""
    rows = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fitting = [(capacity - sum(lengths[i] for i in row), at) for at, row in enumerate(rows)]
        fitting = [pair for pair in fitting if pair[0] >= lengths[index]]
        if fitting:
            rows[min(fitting)[1]].append(index)
        else:
            rows.append([index])
    return [sorted(row) for row in rows]


@st.composite
def cases(draw, max_size=40):
    capacity = draw(st.integers(1, 60))
    return draw(st.lists(st.integers(1, capacity), min_size=1, max_size=max_size)), capacity


@settings(deadline=None, max_examples=1000)
@given(cases())
def test_exact_partition_within_budget(case):
    """Every index comes in one row once; no row is over capacity, empty or out of order."""
    lengths, capacity = case
    rows = pack_rows(lengths, capacity)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    for row in rows:
        assert row.dtype == np.int64
        assert row.size
        assert np.asarray(lengths)[row].sum() <= capacity
        assert (np.diff(row) > 0).all()


@settings(deadline=None, max_examples=1000)
@given(cases())
def test_equals_the_textbook(case):
    """The bisecting version makes the very rows of the quadratic one."""
    assert [row.tolist() for row in pack_rows(*case)] == naive_best_fit_decreasing(*case)


@settings(deadline=None, max_examples=300)
@given(cases(max_size=8))
def test_close_to_the_optimum(case):
    """At most 11/9 of the optimum plus 6/9, and never below it."""
    rows, best = len(pack_rows(*case)), optimum(*case)
    assert best <= rows <= math.floor(11 / 9 * best + 6 / 9)


def test_pairs_of_51_and_49_percent():
    """Eight samples of 51 % and eight of 49 % make eight full rows (next-fit makes twelve)."""
    assert len(pack_rows([51] * 8 + [49] * 8, 100)) == 8


def test_many_equal_lengths():
    """Ten thousand equal samples fill every row to the last token."""
    assert len(pack_rows(np.full(10_000, 25), 100)) == 2_500


def test_too_long():
    """A sample over capacity is refused with index, length and what to set."""
    with pytest.raises(PackingError, match=r"sample 1 has 11 tokens, more than capacity=10\. Set capacity to at least 11"):
        pack_rows([10, 11], 10)
