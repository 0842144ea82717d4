"""best_fit: the textbook's number of rows, in n log n whatever the lengths."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing.dividing.kernels import _best_fit
from forge_packing.dividing.kernels._best_fit import best_fit

from ...naive import best_fit_decreasing


@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from([1, 5, 64, 1000, 10**6, 2**31 - 1]))
def test_equals_the_textbook(data, capacity):
    """As many rows as the quadratic version makes, each within capacity, from a capacity of one token to the largest."""
    longest = data.draw(st.sampled_from([capacity, max(1, capacity // 2), max(1, capacity // 3)]))
    lengths = sorted(data.draw(st.lists(st.integers(1, longest), min_size=1, max_size=24)), reverse=True)
    row_of = [-1] * len(lengths)
    rows = best_fit(lengths, capacity, row_of)
    assert rows == len(best_fit_decreasing(lengths, capacity))
    loads = [sum(length for length, at in zip(lengths, row_of, strict=True) if at == row) for row in range(rows)]
    assert min(loads) >= 1
    assert max(loads) <= capacity
    assert sum(loads) == sum(lengths)


@pytest.mark.parametrize("spread", [1, 40, 2**30])
def test_no_lengths_take_long(monkeypatch, spread):
    """Comparisons grow as n log n also where thousands of rows have nearly the same space, and capacity is far above n.

    Counted by the keys that the heaps look up: eight times the samples may look up little more than eight times as often.
    """
    looked_up = []

    class Counted(list):
        def __getitem__(self, at):
            looked_up[-1] += 1
            return super().__getitem__(at)

    monkeypatch.setattr(_best_fit, "zeros", lambda size: Counted([0] * size))
    capacity = 2**31 - 1
    for n in (500, 4000):
        looked_up.append(0)
        drawn = capacity // 2 - np.random.default_rng(n).integers(0, spread, n)
        best_fit([*sorted(drawn.tolist(), reverse=True), 1], capacity, [0] * (n + 1))
    assert looked_up[1] < 8 * looked_up[0] * 1.6
