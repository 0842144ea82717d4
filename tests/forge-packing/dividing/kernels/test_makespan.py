"""Bins to a makespan, and to passes and ranks."""

from itertools import pairwise, permutations

from hypothesis import given, settings, strategies as st

from forge_packing.dividing.kernels._makespan import arrange, bin_sums, makespan


@settings(deadline=None, max_examples=200)
@given(st.lists(st.integers(0, 50), min_size=6, max_size=6), st.sampled_from([1, 2, 3]))
def test_sorted_neighbours_are_the_best_passes(sums, ranks):
    """No other way to cut six bins into passes has a smaller makespan."""
    every = (sum(max(row[at : at + ranks]) for at in range(0, 6, ranks)) for row in permutations(sums))
    assert makespan(sums, 6, ranks) == min(every)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 11)), min_size=1, max_size=40), st.sampled_from([1, 2, 3, 4]))
def test_arrange(samples, ranks):
    """Samples stay together, passes come costliest first, and the ranks' total costs differ by one micro-batch at most."""
    costs, bin_of = [cost for cost, _ in samples], [b for _, b in samples]
    slot_of = list(bin_of)
    arrange(costs, ranks, 12, slot_of)
    assert len(set(zip(bin_of, slot_of, strict=True))) == len(set(bin_of)) == len(set(slot_of))
    sums = bin_sums(costs, slot_of, 12)
    rows = [sums[at : at + ranks] for at in range(0, 12, ranks)]
    assert all(min(row) >= max(following) for row, following in pairwise(rows))
    in_all = [sum(column) for column in zip(*rows, strict=True)]
    assert max(in_all) - min(in_all) <= max(sums)
