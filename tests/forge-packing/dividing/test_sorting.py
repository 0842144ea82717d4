"""narrow and cut: the same numbers in fewer bits, and np.split's pieces."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_packing.dividing._divide_from_sorting import cut, narrow


@pytest.mark.parametrize("largest", [0, 255, 256, 2**16 - 1, 2**16, 2**32 - 1, 2**32, 2**62])
def test_narrow(largest):
    """No value changes, however few bits it gets, and 16 are enough for what fits into them."""
    values = np.array([largest, 0, largest // 2], dtype=np.int64)
    found = narrow(values)
    assert found.tolist() == values.tolist()
    assert (found.dtype.itemsize <= 2) == (largest < 2**16)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=8))
def test_cut(sizes):
    """As np.split, empty pieces included, and without a copy."""
    starts = np.concatenate([[0], np.cumsum(sizes)])
    array = np.arange(starts[-1])
    pieces = cut(array, starts)
    assert [p.tolist() for p in pieces] == [p.tolist() for p in np.split(array, starts[1:-1])]
    assert all(p.base is array for p in pieces)
