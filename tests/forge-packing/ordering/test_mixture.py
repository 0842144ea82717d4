"""Shares: what weights mean, and that every stretch of the run keeps them."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import PackingError, plan
from forge_packing.ordering._mixture import MAX_PERIOD, draws, whole_shares

SHARES = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(np.array)


@settings(deadline=None, max_examples=1000)
@given(SHARES, st.integers(0, 10**12), st.integers(0, 400))
def test_every_window_keeps_the_shares(shares, start, size):
    """Of any draws in a row, wherever they begin, each source has its share to within less than 2."""
    source, _ = draws(shares, start, start + size)
    counts = np.bincount(source, minlength=shares.size)
    assert (np.abs(counts * shares.sum() - shares * size) < 2 * shares.sum()).all()


@settings(deadline=None, max_examples=300)
@given(SHARES)
def test_every_prefix_is_within_tijdemans_bound(shares):
    """From the beginning on no source is ever 1 - 1/(2M-2) draws from its share, and after a period all are even."""
    period, m = int(shares.sum()), shares.size
    source, nth = draws(shares, 0, 2 * period)
    counts = np.cumsum(source[:, None] == np.arange(m), axis=0)
    off = np.abs(counts * period - shares * np.arange(1, 2 * period + 1)[:, None])
    assert (off * (2 * m - 2) <= period * (2 * m - 3)).all() or m == 1
    assert counts[period - 1].tolist() == shares.tolist()
    assert (nth == counts[np.arange(2 * period), source] - 1).all()


@settings(deadline=None, max_examples=300)
@given(SHARES, st.integers(0, 10**15), st.integers(0, 50), st.integers(0, 50))
def test_draws_do_not_depend_on_where_one_asks(shares, start, before, size):
    """A draw is the same whatever is asked for beside it."""
    alone = draws(shares, start + before, start + before + size)
    together = draws(shares, start, start + before + size)
    assert [part.tolist() for part in alone] == [part[before:].tolist() for part in together]


@pytest.mark.parametrize(
    ("weights", "shares"),
    [
        ([0.7, 0.3], [7, 3]),
        ([2, 1, 1], [2, 1, 1]),
        ([20, 10], [2, 1]),
        ((0.1, 0.2), [1, 2]),
        ([1 / 3, 2 / 3], [1, 2]),
        (np.array([0.25, 0.75], dtype=np.float32), [1, 3]),
        ([Fraction(1, 3), Decimal("0.5")], [2, 3]),
        ([5.0], [1]),
        ([1e-3, 1], [1, 1000]),
    ],
)
def test_weights_are_what_they_print_as(weights, shares):
    """Decimals are taken at their word, and only their ratios count."""
    assert whole_shares(weights).tolist() == shares


@settings(deadline=None, max_examples=300)
@given(st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=30))
def test_finer_shares_are_rounded(weights):
    """Shares too fine for a period of a million are within a millionth of what was asked for, and none becomes nothing."""
    shares = whole_shares(weights)
    assert shares.min() >= 1
    assert shares.sum() <= MAX_PERIOD
    wanted = np.array(weights) / sum(weights)
    lifted = max(0, int((wanted * MAX_PERIOD < 1).sum()))
    assert np.abs(shares / shares.sum() - wanted).max() <= (1 + lifted) / MAX_PERIOD + 1e-12


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([0.5, float("nan")], "finite numbers above 0, found nan at index 1"),
        ([float("inf"), 1], "finite numbers above 0, found inf at index 0"),
        ([1, 0], "found 0 at index 1. Leave out a source without weight"),
        ([1, -0.5], "found -0.5 at index 1"),
        ([True, 1], "found True at index 0"),
        (["1", 1], "found '1' at index 0"),
        ([None, 1], "found None at index 0"),
        ([], "between 1 and 4096 numbers, got 0"),
        ([1] * 5000, "between 1 and 4096 numbers, got 5000"),
        ("12", "must be a sequence of numbers"),
        (0.5, "must be a sequence of numbers"),
    ],
)
def test_refuses(weights, message):
    """What is no weight is a PackingError that says which and what it is."""
    with pytest.raises(PackingError, match=message):
        plan([1, 2], batch_size=1, max_tokens=9, sources=[0, 1], weights=weights)


def test_a_weight_of_any_size():
    """A whole number of thousands of digits is a weight as well; the smallest share that is kept is a millionth."""
    assert whole_shares([10**5000, 10**5000]).tolist() == [1, 1]
    assert whole_shares([1, 10**5000]).tolist() == [1, 999_999]


@pytest.mark.parametrize(
    ("sources", "message"),
    [
        ([0, 1], "one entry a sample: got 2 for 3 lengths"),
        ([0, 1, 2], "numbers from 0 to 1, one for each of 2 weights, found 2 at index 2"),
        ([0, -1, 1], "found -1 at index 1"),
        ([0, 0, 0], "source 1 has a weight and no sample"),
        ([0.0, 1.0, 1.0], "sources must be integers"),
        (None, "weights are given for 2 sources, and no sources"),
    ],
)
def test_sources_and_weights_belong_together(sources, message):
    """Sources that do not fit the samples, or the weights, are named."""
    with pytest.raises(PackingError, match=message):
        plan([1, 2, 3], batch_size=1, max_tokens=9, sources=sources, weights=[1, 1])


def test_a_plan_keeps_its_shares():
    """A quarter of every step comes from the source with a quarter of the weight, though it has a hundredth of the data."""
    sources = [0] * 990 + [1] * 10
    made = plan([3] * 1000, batch_size=32, max_tokens=9, sources=sources, weights=[0.75, 0.25], epochs=3, seed=4)
    for step in range(made.num_steps - 1):
        samples = made.samples(step)
        if samples.size == 32:
            assert abs((samples >= 990).sum() - 8) < 2
    made.check()
    assert (made.num_steps, made.num_samples) == (96, 3000)
    assert made.weights.tolist() == [3, 1]
