"""refine: exchanges that never cost anything, and lose nothing."""

from hypothesis import given, settings, strategies as st

from forge_packing.dividing.kernels._best_fit import best_fit
from forge_packing.dividing.kernels._makespan import bin_sums, makespan
from forge_packing.dividing.kernels._refine import costliest_two, refine

from ...naive import steps


@settings(deadline=None, max_examples=300)
@given(steps(most_ranks=5), st.sampled_from([0, 5, 10_000]))
def test_never_worse(step, work):
    """From any packing within the budget to one within the budget, of the same samples, with no larger makespan."""
    lengths, capacity, ranks = step
    lengths = sorted(lengths, reverse=True)
    costs = [length * (length + 3) for length in lengths]
    bin_of = [-1] * len(lengths)
    bins = -(-best_fit(lengths, capacity, bin_of) // ranks) * ranks
    before = makespan(bin_sums(costs, bin_of, bins), bins, ranks)
    after = refine(lengths, costs, ranks, capacity, bin_of, bins, 0, work)
    assert after <= before
    assert after == makespan(bin_sums(costs, bin_of, bins), bins, ranks)
    assert max(bin_sums(lengths, bin_of, bins)) <= capacity
    assert sum(bin_sums(costs, bin_of, bins)) == sum(costs)


def test_moves_a_sample():
    """One bin has two samples, the other none: one of them goes over."""
    bin_of = [0, 0]
    assert refine([5, 5], [5, 5], 2, 10, bin_of, 2, 0, 1000) == 5
    assert sorted(bin_of) == [0, 1]


def test_exchanges_two():
    """Two full bins can only exchange: 6+4 and 3+3 of budget 10 become 6+3 and 4+3."""
    bin_of = [0, 0, 1, 1]
    assert refine([6, 4, 3, 3], [6, 4, 3, 3], 2, 10, bin_of, 2, 0, 1000) == 9
    assert bin_of[0] != bin_of[1]


def test_fills_the_pass_of_a_giant():
    """What waits in a later pass comes beside the giant, where it costs nothing."""
    costs = [100, 5, 5, 5, 5]
    bin_of = [0, 2, 2, 3, 3]
    assert refine([10, 5, 5, 5, 5], costs, 2, 10, bin_of, 4, 0, 1000) == 105


@given(st.lists(st.integers(0, 9), min_size=6, max_size=6), st.sampled_from([0, 3]))
def test_costliest_two(sums, start):
    """Of a pass of three, the places of the two costliest."""
    best, second = costliest_two(sums, list(range(6)), start, 3)
    assert best != second
    assert [sums[best], sums[second]] == sorted(sums[start : start + 3], reverse=True)[:2]
