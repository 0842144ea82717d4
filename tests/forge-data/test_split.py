"""Which samples are held out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forge_data import DataError
from forge_data._split import split_indices


@given(count=st.integers(0, 300), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32 - 1))
def test_parts(count, fraction, seed):
    """The two parts are disjoint and complete, in rising order, of the size that was asked for."""
    train, held_out = split_indices(count, fraction, seed)
    assert sorted([*train, *held_out]) == list(range(count))
    assert len(held_out) == round(count * fraction)
    assert np.all(np.diff(train) > 0)
    assert np.all(np.diff(held_out) > 0)


def test_written_down():
    """The same samples are held out for ever: this is what seed 42 takes of twenty."""
    assert split_indices(20, 0.25, 42)[1].tolist() == [0, 3, 6, 7, 14]


def test_seeds_differ():
    """Another seed holds out others, and no index is favoured."""
    counts = np.zeros(50, dtype=int)
    for seed in range(400):
        counts[split_indices(50, 0.2, seed)[1]] += 1
    assert counts.sum() == 4000
    assert counts.min() > 40
    assert counts.max() < 130


@pytest.mark.parametrize("fraction", [0, 1, -0.1, float("nan")])
def test_no_share(fraction):
    """A share is between 0 and 1."""
    with pytest.raises(DataError, match="must lie between 0 and 1"):
        split_indices(10, fraction, 0)
