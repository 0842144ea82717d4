"""Waiting lists: bins that wait for the first sample short enough for them.

The bins that wait for a sample form a ring: `waiting[sample]` is the number + 1 of the bin that came last, and `after` of
that one the number + 1 of the first. So appending takes constant time.
"""

from forge_packing.dividing.kernels._heap import Ints


def first_of_at_most(lengths: Ints, start: int, limit: int) -> int:
    """Find the first sample from `start` on no longer than `limit`, or n for none.

    Lengths descend; n is their number.
    """
    low = start
    high = len(lengths)
    while low < high:
        middle = (low + high) // 2
        if lengths[middle] <= limit:
            high = middle
        else:
            low = middle + 1
    return low


def wait(waiting: Ints, after: Ints, sample: int, item: int) -> None:
    """Append a bin to the ring of a sample."""
    last = waiting[sample]
    if last > 0:
        after[item] = after[last - 1]
        after[last - 1] = item + 1
    else:
        after[item] = item + 1
    waiting[sample] = item + 1


def first_waiting(waiting: Ints, after: Ints, sample: int) -> int:
    """Open a sample's ring into a list ending with 0; return its first bin's number + 1, or 0."""
    last = waiting[sample]
    if last == 0:
        return 0
    first = after[last - 1]
    after[last - 1] = 0
    return first
