"""Lower bounds: never above what trying everything finds, and tight where they are meant to be."""

import numpy as np
import pytest
from hypothesis import given, settings

from forge_packing import Cost
from forge_packing.dividing._bounds import makespan_bound, micro_batch_bound, row_bound

from ..naive import COSTS, best_possible, steps


@settings(deadline=None, max_examples=500)
@given(steps(most_samples=7, most_ranks=4), COSTS)
def test_nothing_beats_the_bounds(step, cost):
    """No partition of seven samples has fewer rows or passes, or a smaller makespan, than the bounds say."""
    lengths, capacity, ranks = step
    array = np.array(lengths)
    rows, _, _ = best_possible(lengths, capacity, 1, cost)
    assert 1 <= row_bound(array, capacity) <= rows
    passes, least, _ = best_possible(lengths, capacity, ranks, cost)
    assert 1 <= micro_batch_bound(array, capacity, ranks) <= passes
    assert makespan_bound(array, capacity, ranks, cost) <= least * (1 + 1e-12)


@pytest.mark.parametrize(
    ("lengths", "rows"),
    [
        ([10, 10, 10], 3),  # the tokens
        ([6, 6, 6], 3),  # no two fit together
        ([7, 7, 4, 4, 4, 4], 4),  # nothing fits beside the long ones: L2
        ([4, 4, 4, 4, 4], 3),  # two to a row, though 2.5 would fill it: u^(2)
        ([3, 3, 3, 3], 2),
    ],
)
def test_rows(lengths, rows):
    """Each kind of bound is the best one for a case of its own (capacity 10)."""
    assert row_bound(np.array(lengths), 10) == rows


def test_makespan_of_one_giant():
    """One giant: the other ranks can do no more beside it than a full micro-batch of the rest costs."""
    cost = Cost(per_token=1.0, per_token_squared=1.0)
    # 100 tokens cost 10,100; beside it at most 100 tokens in samples of 10, which cost 1,100; three of them hold 30 * 110.
    assert makespan_bound(np.array([100] + [10] * 30), 100, 4, cost) == 10_100
    # Twice as many samples as find room beside it (3 ranks * 100 tokens): the rest is spread over four ranks.
    assert makespan_bound(np.array([100] + [10] * 60), 100, 4, cost) == 10_100 + 30 * 110 / 4


@pytest.mark.parametrize(
    ("lengths", "ranks", "least"),
    [
        ([4], 8, 4),  # one sample lies on one rank, however many there are
        ([4, 4, 3, 1], 2, 7),  # of the three costliest, one rank has two
        ([3, 3, 3, 3, 3], 2, 9),  # of five, three
    ],
)
def test_the_busiest_rank(lengths, ranks, least):
    """Few samples for the ranks: no rank can have its even share of them."""
    assert makespan_bound(np.array(lengths), 100, ranks, Cost(1.0, 0.0)) == least


def test_makespan_counts_every_pass():
    """The fixed cost of a pass is paid as often as the bound on micro-batches says."""
    with_overhead = makespan_bound(np.array([6, 6, 6]), 10, 1, Cost(1.0, 0.0, 5.0))
    assert with_overhead == 18 + 3 * 5
