"""Sizes, each between two bounds → those that fill a limit best.

The sums of all subsets are the bits of one integer.
"""

from __future__ import annotations

from collections.abc import Sequence


def closest_sum(bounds: Sequence[tuple[int, int]], limit: int) -> list[int]:
    """Choose the sizes whose sum comes closest to `limit` from below.

    Each may be any number from its low to its high bound. Returns the numbers of those chosen, ascending. It takes
    `len(bounds) * limit` bits of memory.

    >>> closest_sum([(7, 9), (3, 3), (5, 5)], 11)
    [0, 1]
    >>> closest_sum([(9, 9), (3, 3), (5, 5)], 8)
    [1, 2]
    """
    within = (1 << (limit + 1)) - 1
    reached = [1]
    for low, high in bounds:
        # Bit n: some of the sizes so far add up to n.
        reached.append(reached[-1] | (_spread(reached[-1] << low, high - low + 1) & within))
    total, chosen = reached[-1].bit_length() - 1, []
    for at in range(len(bounds) - 1, -1, -1):
        if reached[at] >> total & 1:
            continue
        low, high = bounds[at]
        # The largest sum of those before it which this one completes.
        below = reached[at] & ((1 << (total - low + 1)) - 1)
        assert total - high <= below.bit_length() - 1
        total = below.bit_length() - 1
        chosen.append(at)
    return chosen[::-1]


def _spread(bits: int, width: int) -> int:
    """Set the `width - 1` bits above each bit too."""
    done = 1
    while done < width:
        step = min(done, width - done)
        bits |= bits << step
        done += step
    return bits
