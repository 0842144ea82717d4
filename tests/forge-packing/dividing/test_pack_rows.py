"""pack_rows: exact, within budget, never worse than best fit, close to the optimum."""

import numpy as np
import pytest
from hypothesis import given, settings

from forge_packing import Cost, PackingError, pack_rows
from forge_packing.dividing._bounds import row_bound

from ..naive import best_fit_decreasing, best_possible, steps


@settings(deadline=None, max_examples=1000)
@given(steps())
def test_exact_partition_within_budget(step):
    """Every index comes in one row once; no row is over capacity, empty or out of order."""
    lengths, capacity, _ = step
    rows = pack_rows(lengths, capacity)
    assert sorted(np.concatenate(rows).tolist()) == list(range(len(lengths)))
    for row in rows:
        assert row.dtype == np.int64
        assert row.size
        assert np.asarray(lengths)[row].sum() <= capacity
        assert (np.diff(row) > 0).all()


@settings(deadline=None, max_examples=300)
@given(steps())
def test_no_more_rows_than_the_textbook(step):
    """Never more rows than best-fit decreasing, nor fewer than the bound."""
    lengths, capacity, _ = step
    assert (
        row_bound(np.array(lengths), capacity)
        <= len(pack_rows(lengths, capacity))
        <= len(best_fit_decreasing(lengths, capacity))
    )


@settings(deadline=None, max_examples=300)
@given(steps(most_samples=8))
def test_eight_samples_are_packed_optimally_or_nearly(step):
    """At most one row more than the optimum for eight samples, which best fit alone would allow too."""
    lengths, capacity, _ = step
    rows, best = len(pack_rows(lengths, capacity)), best_possible(lengths, capacity, 1, Cost())[0]
    assert best <= rows <= 11 / 9 * best + 6 / 9


def test_better_than_best_fit():
    """Where best fit wastes space, a search for what fills a row does not."""
    lengths = [11, 8, 3, 2, 2, 2, 2]  # best fit: 11+3, 8+2+2+2, 2
    assert len(best_fit_decreasing(lengths, 15)) == 3
    assert [row.tolist() for row in pack_rows(lengths, 15)] == [[0, 3, 4], [1, 2, 5, 6]]


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
