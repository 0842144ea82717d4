"""Waiting bins: each for the first sample that it can take, in rings that open into lines."""

from hypothesis import given, strategies as st

from forge_packing.dividing.kernels._waiting import first_of_at_most, first_waiting, wait


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(0, 20), st.integers(0, 10))
def test_first_of_at_most(lengths, start, limit):
    """What looking at one after another finds, or the number of samples."""
    lengths = sorted(lengths, reverse=True)
    start = min(start, len(lengths))
    assert first_of_at_most(lengths, start, limit) == next(
        (i for i in range(start, len(lengths)) if lengths[i] <= limit), len(lengths)
    )


@given(st.permutations(range(8)), st.lists(st.integers(0, 2), min_size=8, max_size=8))
def test_rings(items, samples):
    """Every item comes back once, for its own sample, in the order in which it came; where none waits there is no line."""
    waiting, after, came = [0] * 3, [0] * 8, {0: [], 1: [], 2: []}
    for item in items:
        wait(waiting, after, samples[item], item)
        came[samples[item]].append(item)
    for sample, expected in came.items():
        found, entering = [], first_waiting(waiting, after, sample)
        while entering > 0:
            found.append(entering - 1)
            entering = after[entering - 1]
        assert found == expected
