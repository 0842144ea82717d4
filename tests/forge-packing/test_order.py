"""The order of samples: a function of (N, seed, epoch), the same for ever."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from forge_packing._order import epoch_order


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**32 - 1), st.integers(0, 50))
def test_a_permutation(n, seed, epoch):
    """Every sample comes once."""
    order = epoch_order(n, seed, epoch)
    assert order.dtype == np.int64
    assert sorted(order.tolist()) == list(range(n))


def test_golden():
    """The order of these few samples never changes: a changed one would silently change every run."""
    golden = {
        (0, 0): [0, 8, 9, 3, 7, 5, 1, 2, 6, 4],
        (0, 1): [3, 7, 4, 2, 9, 8, 1, 6, 5, 0],
        (1, 0): [2, 0, 1, 4, 5, 6, 7, 8, 3, 9],
    }
    assert {key: epoch_order(10, *key).tolist() for key in golden} == golden


def test_neither_seed_nor_epoch_stands_for_the_other():
    """(seed, epoch) pairs with the same sum have orders of their own, as have neighbours."""
    orders = {tuple(epoch_order(100, seed, epoch).tolist()) for seed in range(6) for epoch in range(6)}
    assert len(orders) == 36


def test_uniform():
    """Each sample comes at each place about equally often (chi-squared over 4,000 seeds, far in the tail)."""
    n, seeds = 5, 4_000
    counts = np.zeros((n, n))
    for seed in range(seeds):
        counts[np.arange(n), epoch_order(n, seed, 0)] += 1
    expected = seeds / n
    assert ((counts - expected) ** 2 / expected).sum() < 45  # 16 degrees of freedom: p = 1e-4
