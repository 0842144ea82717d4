"""The order of samples: a function of (N, seed, epoch, source), the same for ever, a table or computed place by place."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing.ordering import _permutation
from forge_packing.ordering._permutation import TABLE, feistel, shuffled

SEEDS = st.integers(0, 2**32 - 1)


def order(n, seed=0, epoch=0, source=0):
    return shuffled(np.arange(n), n, seed=seed, epoch=epoch, source=source)


@settings(deadline=None, max_examples=500)
@given(st.integers(1, 300), SEEDS, st.integers(0, 2**40), st.integers(0, 50))
def test_a_permutation(n, seed, epoch, source):
    """Every sample comes once."""
    found = order(n, seed, epoch, source)
    assert found.dtype == np.int64
    assert sorted(found.tolist()) == list(range(n))


@settings(deadline=None, max_examples=500)
@given(st.integers(1, 3000), st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9))
def test_the_bijection_is_one_whatever_its_keys(n, keys):
    """Every number below N comes once out of the network, with any keys and any number of rounds."""
    found = feistel(np.arange(n), n, np.array(keys, dtype=np.uint64))
    assert np.bincount(found, minlength=n).tolist() == [1] * n


@settings(deadline=None, max_examples=200)
@given(st.integers(TABLE + 1, 2**62), SEEDS, st.data())
def test_beyond_the_table(n, seed, data):
    """Of any number of samples, a place's sample is one of them, its own, and the same whichever places are asked beside it."""
    places = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=30, unique=True))
    found = shuffled(np.array(places), n, seed=seed, epoch=3)
    assert len(set(found.tolist())) == len(places)
    assert 0 <= found.min() <= found.max() < n
    assert [int(shuffled(np.array([place]), n, seed=seed, epoch=3)[0]) for place in places] == found.tolist()


@pytest.mark.parametrize("n", [TABLE, TABLE + 1, 250_000])
def test_whole_orders_on_both_sides_of_the_threshold(n):
    """The largest table and the smallest bijection are both whole permutations."""
    assert np.array_equal(np.sort(order(n)), np.arange(n))


def test_golden():
    """The order of these few samples never changes: a changed one would silently change every run."""
    golden = {
        (0, 0): [0, 8, 9, 3, 7, 5, 1, 2, 6, 4],
        (0, 1): [3, 7, 4, 2, 9, 8, 1, 6, 5, 0],
        (1, 0): [2, 0, 1, 4, 5, 6, 7, 8, 3, 9],
    }
    assert {key: order(10, *key).tolist() for key in golden} == golden


def test_golden_bijection():
    """Nor does that of a billion."""
    found = shuffled(np.arange(6), 10**9, seed=1, epoch=2, source=3)
    assert found.tolist() == [66498941, 622269716, 475240787, 487847212, 93963119, 469278430]


def test_neither_seed_nor_epoch_nor_source_stands_for_another():
    """(seed, epoch, source) triples with the same sum have orders of their own, as have neighbours."""
    for n in (100, TABLE + 1):
        places = np.arange(100)
        orders = {
            tuple(shuffled(places, n, seed=seed, epoch=epoch, source=source).tolist())
            for seed in range(4)
            for epoch in (0, 1, 2, 2**32)
            for source in range(4)
        }
        assert len(orders) == 64


def orders_of_five(kind, seeds):
    if kind == "table":
        return np.stack([order(5, seed) for seed in range(seeds)])
    return np.stack([feistel(np.arange(5), 5, _permutation._raw(8, seed, 0, 0)) for seed in range(seeds)])


@pytest.mark.parametrize("kind", ["table", "bijection"])
def test_uniform(kind):
    """Each sample comes at each place about equally often (chi-squared over 4,000 seeds, far in the tail)."""
    found = orders_of_five(kind, 4_000)
    counts = np.stack([np.bincount(column, minlength=5) for column in found.T])
    assert ((counts - 800) ** 2 / 800).sum() < 45  # 16 degrees of freedom: p = 1e-4


@pytest.mark.parametrize("n", [TABLE + 1, 10**6, 10**9])
def test_looks_random(n):
    """Of many neighbouring places: fills its range evenly, neighbours are independent, no drift, no pattern in the low bits."""
    size = 2**16
    found = shuffled(np.arange(size), n, seed=7, epoch=0) / n
    tens = np.bincount((found * 10).astype(int), minlength=10)
    assert ((tens - size / 10) ** 2 / (size / 10)).sum() < 34  # 9 degrees of freedom: p = 1e-4
    pairs = np.bincount((found[:-1] * 8).astype(int) * 8 + (found[1:] * 8).astype(int), minlength=64)
    assert ((pairs - size / 64) ** 2 / (size / 64)).sum() < 115  # 63: p = 1e-4
    for lag in (1, 2, 3, 257):
        assert abs(np.corrcoef(found[:-lag], found[lag:])[0, 1]) < 4 / np.sqrt(size)
    assert abs(np.corrcoef(np.arange(size), found)[0, 1]) < 4 / np.sqrt(size)
    odd = np.bincount(shuffled(np.arange(size), n, seed=7, epoch=0) % 2, minlength=2)
    assert abs(odd[0] - size / 2) < 4 * np.sqrt(size) / 2


def test_neighbouring_orders_are_unrelated():
    """The next epoch's and the next seed's orders share about one place with this one, as two random orders do."""
    n = 100_000
    first = order(n, 5, 0)
    for other in (order(n, 5, 1), order(n, 6, 0), order(n, 5, 0, 1)):
        assert (first == other).sum() < 12  # Poisson with mean 1: p = 1e-9
        assert abs(np.corrcoef(first, other)[0, 1]) < 4 / np.sqrt(n)
