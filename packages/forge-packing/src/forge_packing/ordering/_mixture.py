"""Mixtures: weights of M sources → the source of each draw, shares kept in every window.

Shares are whole numbers that sum to a period D; one period is a table, which the run repeats. So any draw is one look-up,
and over every W draws a source with share s has more than s·W - 2 and fewer than s·W + 2 of them, wherever they begin.
Source: Tijdeman, The chairman assignment problem, Discrete Mathematics 32, 1980: prefixes stay within 1 - 1/(2M-2).
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError

MAX_PERIOD = 10**6
"""The longest period: 12 MB of table. Finer shares are rounded to multiples of 1/MAX_PERIOD: six decimal digits are exact."""

MAX_SOURCES = 4096
"""The most sources of a mixture."""


def whole_shares(weights: object) -> Int64Array:
    """Convert weights to whole shares int64[M]: the draws of each source in every sum(shares).

    A float means the decimal that it prints as: 0.7 and 0.3 are 7 and 3. Raises PackingError for anything but finite
    numbers above 0.

    >>> whole_shares([0.7, 0.3]).tolist(), whole_shares([2, 1, 1]).tolist()
    ([7, 3], [2, 1, 1])
    """
    if isinstance(weights, (str, bytes)) or not isinstance(weights, (Sequence, np.ndarray)):
        raise PackingError(f"weights must be a sequence of numbers, one a source, got {weights!r}")
    if not 1 <= len(weights) <= MAX_SOURCES:
        raise PackingError(f"weights must be between 1 and {MAX_SOURCES} numbers, got {len(weights)}")
    exact = [_exact(index, weight) for index, weight in enumerate(weights)]
    total = sum(exact)
    parts = [weight / total for weight in exact]
    period = math.lcm(*(part.denominator for part in parts))
    if period > MAX_PERIOD:
        return _rounded(parts)
    return np.array([part.numerator * (period // part.denominator) for part in parts], dtype=np.int64)


def _exact(index: int, weight: object) -> Fraction:
    number = None
    if not isinstance(weight, (bool, np.bool_, str, bytes)):
        try:
            number = Fraction(int(weight)) if isinstance(weight, (int, np.integer)) else Fraction(str(weight))
        except (ValueError, ZeroDivisionError):  # nan, inf, and what is not a number
            number = None
    if number is None or number <= 0:
        raise PackingError(
            f"weights must be finite numbers above 0, found {weight!r} at index {index}. Leave out a source without weight"
        )
    return number


def _rounded(parts: list[Fraction]) -> Int64Array:
    """Round shares to multiples of 1/MAX_PERIOD by largest remainder, at least 1 each."""
    exact = [part * MAX_PERIOD for part in parts]
    shares = [max(1, math.floor(share)) for share in exact]
    left = MAX_PERIOD - sum(shares)
    by_remainder = sorted(range(len(parts)), key=lambda i: (shares[i] - exact[i], i))
    for i in by_remainder[: max(left, 0)]:
        shares[i] += 1
    for _ in range(-min(left, 0)):  # what shares below 1 were given is taken from the largest
        shares[shares.index(max(shares))] -= 1
    divisor = math.gcd(*shares)
    return np.array([share // divisor for share in shares], dtype=np.int64)


def draws(shares: Int64Array, start: int, stop: int) -> tuple[Int64Array, Int64Array]:
    """Return (source int64[P], nth int64[P]) of the draws from start to stop.

    nth counts the draws of that source from 0.
    """
    table_source, table_nth = _period(tuple(shares.tolist()))
    cycle, place = np.divmod(start % table_source.size + np.arange(stop - start, dtype=np.int64), table_source.size)
    source = table_source[place].astype(np.int64)
    return source, table_nth[place] + (cycle + start // table_source.size) * shares[source]


def drawn(shares: Int64Array, stop: int) -> Int64Array:
    """Count the draws of each source before draw `stop`: int64[M].

    >>> drawn(np.array([3, 1]), 10)
    array([8, 2])
    """
    table_source, _ = _period(tuple(shares.tolist()))
    cycles, rest = divmod(stop, table_source.size)
    return cycles * shares + np.bincount(table_source[:rest], minlength=shares.size)


@lru_cache(maxsize=4)
def _period(shares: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Return (source int32[D], nth int64[D]) of one period, by earliest deadline first.

    Draw j of a source may come as soon as the source is not too far ahead (its release), and must come before it is too far
    behind (its deadline). The released draw of the earliest deadline is taken, which meets every deadline because, by
    Tijdeman's theorem, some order does.
    """
    period, sources = sum(shares), len(shares)
    if sources == 1:
        return np.zeros(period, dtype=np.int32), np.arange(period, dtype=np.int64)
    unit, slack = 2 * sources - 2, 2 * sources - 3  # the greatest deviation allowed is slack / unit draws
    jobs = []
    for source, share in enumerate(shares):
        j = np.arange(share, dtype=np.int64)
        release = -(-(period * ((j + 1) * unit - slack)) // (share * unit))
        deadline = (period * (j * unit + slack)) // (share * unit) + 1
        jobs.append(np.stack([release, deadline, np.full(share, source, dtype=np.int64), j]))
    table = np.concatenate(jobs, axis=1)
    table = table[:, np.argsort(table[0], kind="stable")]
    release, deadline, source, nth = table
    # One integer that sorts by deadline, then by place in the table.
    keys = (deadline * period + np.arange(period, dtype=np.int64)).tolist()
    waiting: list[int] = []
    order = []
    released = 0
    for ready in np.searchsorted(release, np.arange(1, period + 1), side="right").tolist():
        if ready == released:
            order.append(heapq.heappop(waiting))
            continue
        for key in keys[released : ready - 1]:
            heapq.heappush(waiting, key)
        order.append(heapq.heappushpop(waiting, keys[ready - 1]))
        released = ready
    drawn = np.array(order, dtype=np.int64) % period
    return source[drawn].astype(np.int32), nth[drawn]
