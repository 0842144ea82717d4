"""Which samples are held out, and which of them are pairs."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_data import DataError, StoreError
from forge_data.store._duplicates import grouped
from forge_data.store._split import pairs_of, split_indices


@given(count=st.integers(0, 300), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32 - 1))
def test_parts(count, fraction, seed):
    """The two parts are disjoint and complete, in rising order, and of the size asked for."""
    train, held_out = split_indices(np.arange(count), fraction, seed)
    assert sorted([*train, *held_out]) == list(range(count))
    assert len(held_out) == round(count * fraction)
    assert np.all(np.diff(train) > 0)
    assert np.all(np.diff(held_out) > 0)


@given(count=st.integers(0, 300), part=st.integers(1, 320), seed=st.integers(0, 2**32 - 1))
def test_a_number(count, part, seed):
    """A whole number is that many, the same ones that a share of as many holds out."""
    held_out = split_indices(np.arange(count), part, seed)[1]
    assert len(held_out) == min(part, count)
    if part < count:
        assert held_out.tolist() == split_indices(np.arange(count), part / count, seed)[1].tolist()


def test_written_down():
    """The same samples are held out for ever: seed 42 takes these of twenty."""
    assert split_indices(np.arange(20), 0.25, 42)[1].tolist() == [0, 3, 6, 7, 14]


def test_seeds_differ():
    """Another seed holds out others, and no index is favoured."""
    counts = np.zeros(50, dtype=int)
    for seed in range(400):
        counts[split_indices(np.arange(50), 0.2, seed)[1]] += 1
    assert counts.sum() == 4000
    assert counts.min() > 40
    assert counts.max() < 130


@given(
    digests=st.lists(st.integers(0, 8), min_size=1, max_size=60),
    fraction=st.floats(0.01, 0.99) | st.integers(1, 60),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_twins_stay_together(digests, fraction, seed, data):
    """Samples of the same tokens or one row are on one side, and no border between groups is nearer to the share."""
    count = len(digests)
    rows = np.sort(data.draw(st.lists(st.integers(0, count), min_size=count, max_size=count)))
    train, held_out = split_indices(grouped(np.array(digests), rows), fraction, seed)
    assert sorted([*train, *held_out]) == list(range(count))
    for keys in (np.array(digests), rows):
        assert not set(keys[train].tolist()) & set(keys[held_out].tolist())
    largest = int(np.unique(grouped(np.array(digests), rows), return_counts=True)[1].max())
    wanted = min(fraction, count) if isinstance(fraction, int) else round(count * fraction)
    assert abs(len(held_out) - wanted) <= largest / 2


def test_twins_of_twins():
    """A chain of rows and repetitions is one group, named by its first."""
    assert grouped(np.array([5, 6, 6, 7, 5]), np.array([0, 0, 1, 2, 3])).tolist() == [0, 0, 0, 3, 0]


@pytest.mark.parametrize("fraction", [0, 1.0, -0.1, -3, 2.5, True, float("nan")])
def test_no_share(fraction):
    """A share must be between 0 and 1, and a number a whole one."""
    with pytest.raises(DataError, match="must be a share between 0 and 1, or a whole number"):
        split_indices(np.arange(10), fraction, 0)


@given(
    st.lists(st.integers(0, 30), unique=True).flatmap(
        lambda pairs: st.permutations([s for p in pairs for s in (2 * p, 2 * p + 1)])
    )
)
def test_pairs(indices):
    """Both sides of every pair are found in any order, in the order of the chosen ones."""
    chosen = [at for at, index in enumerate(indices) if index % 2 == 0]
    expected = [[at, indices.index(indices[at] + 1)] for at in chosen]
    assert pairs_of(np.array(indices, dtype=np.int64)).tolist() == expected


@pytest.mark.parametrize("indices", [[0], [1, 2], [0, 1, 3], [0, 0, 1, 1], [0, 2]])
def test_half_a_pair(indices):
    """One side without the other is refused."""
    with pytest.raises(StoreError, match="one side of a preference without the other"):
        pairs_of(np.array(indices, dtype=np.int64))
