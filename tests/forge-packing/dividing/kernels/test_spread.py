"""levels, spread and greedy: samples to bins by cost, and as mini-trainer does."""

from hypothesis import given, settings, strategies as st

from forge_packing.dividing.kernels import _spread
from forge_packing.dividing.kernels._spread import greedy, levels, spread

from ...naive import mini_trainers, steps

costs_in_order = st.lists(st.integers(1, 1000), min_size=1, max_size=30).map(lambda costs: sorted(costs, reverse=True))


@given(costs_in_order, st.integers(1, 6), st.integers(1, 6))
def test_levels(costs, passes, ranks):
    """Descending; at least each pass's longest sample; room for all work; and no higher than that takes."""
    found = levels(costs, passes, ranks)
    floors = [costs[k * ranks] if k * ranks < len(costs) else 0 for k in range(passes)]
    assert found == sorted(found, reverse=True)
    assert all(level >= floor for level, floor in zip(found, floors, strict=True))
    assert sum(found) * ranks >= sum(costs)
    raised = [level for level, floor in zip(found, floors, strict=True) if level > floor]
    assert len(set(raised)) <= 1
    assert not raised or (sum(found) - passes) * ranks < sum(costs)


def naive_spread(lengths, costs, ranks, capacity, aims):
    """Each sample to the bin furthest below its aim that has room, by looking at all bins."""
    bins = range(len(aims) * ranks)
    loads, sums, bin_of = [0] * len(bins), [0] * len(bins), []
    for length, cost in zip(lengths, costs, strict=True):
        fitting = [b for b in bins if loads[b] + length <= capacity]
        if not fitting:
            return None
        b = min(fitting, key=lambda b: (sums[b] - aims[b // ranks], b))
        loads[b] += length
        sums[b] += cost
        bin_of.append(b)
    return bin_of


@settings(deadline=None, max_examples=300)
@given(steps(most_ranks=4), st.integers(1, 8))
def test_spread_equals_the_naive_version(step, passes):
    """The heap and the waiting line make the very choices of looking at every bin, failure included."""
    lengths, capacity, ranks = step
    lengths = sorted(lengths, reverse=True)
    costs = [length * length + 7 for length in lengths]
    aims = levels(costs, passes, ranks)
    bin_of = [-1] * len(lengths)
    done = spread(lengths, costs, ranks, capacity, aims, bin_of)
    naive = naive_spread(lengths, costs, ranks, capacity, aims)
    assert done == (naive is not None)
    if done:
        assert bin_of == naive


@settings(deadline=None, max_examples=300)
@given(steps(most_samples=30))
def test_greedy_is_mini_trainers_packer(step):
    """One run makes the passes that searching for the longest prefix again and again makes, load for load."""
    lengths, capacity, ranks = step
    lengths = sorted(lengths, reverse=True)
    bin_of = [-1] * len(lengths)
    passes = greedy(lengths, ranks, capacity, bin_of)
    ours = [
        sorted(sum(n for n, b in zip(lengths, bin_of, strict=True) if b == k * ranks + rank) for rank in range(ranks))
        for k in range(passes)
    ]
    assert ours == [sorted(map(sum, row)) for row in mini_trainers(lengths, capacity, ranks)]


def test_spread_takes_lines_not_bins(monkeypatch):
    """However many bins there are, the heap holds about as many lines as there are costs: looking them up stays n."""
    looked_up = [0]

    class Counted(list):
        def __getitem__(self, at):
            looked_up[0] += 1
            return super().__getitem__(at)

    monkeypatch.setattr(_spread, "zeros", lambda size: Counted([0] * size))
    for n in (400, 6400):
        looked_up[0] = 0
        lengths = sorted([(7 * i) % 20 + 1 for i in range(n)], reverse=True)
        assert spread(lengths, lengths, 2, 100, [10 * sum(lengths)] * (n // 8), [0] * n)
        if n == 400:
            few = looked_up[0]
    assert looked_up[0] < 1.2 * 16 * few
