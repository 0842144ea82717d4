"""divide_one and least_passes: what `divide` rests on, in its own terms."""

from hypothesis import given, settings

from forge_packing import Cost
from forge_packing.dividing.kernels._divide import divide_all, divide_one, least_passes

from ...naive import best_possible, steps


@settings(deadline=None, max_examples=300)
@given(steps(most_samples=7, most_ranks=4))
def test_least_passes(step):
    """No division of seven samples has fewer passes."""
    lengths, capacity, ranks = step
    assert 1 <= least_passes(lengths, ranks, capacity) <= best_possible(lengths, capacity, ranks, Cost())[0]


@settings(deadline=None, max_examples=300)
@given(steps())
def test_slots(step):
    """Slots are pass * ranks + rank, below passes * ranks, and no pass is without a sample."""
    lengths, capacity, ranks = step
    lengths = sorted(lengths, reverse=True)
    slots = [-1] * len(lengths)
    passes = divide_one(lengths, lengths, ranks, capacity, slots)
    assert {slot // ranks for slot in slots} == set(range(passes))
    assert min(slots) >= 0


def test_steps_do_not_touch():
    """Each step is divided alone, wherever it stands."""
    slots, passes = [-1] * 6, [0, 0]
    divide_all([9, 5, 4, 8, 2, 1], [9, 5, 4, 8, 2, 1], [0, 3, 6], [10, 10], 0, [2, 2], slots, passes)
    assert passes == [1, 1]
    assert slots[:3] in ([0, 1, 1], [1, 0, 0])
    assert slots[3:] in ([0, 1, 1], [1, 0, 0])
