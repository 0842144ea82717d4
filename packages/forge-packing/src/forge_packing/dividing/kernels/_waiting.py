"""Bins without room to the samples that they wait for: each to the first one, in descending order, that it can take.

A sample's bins form a ring: `waiting[sample]` is the number + 1 of the last that came, `after` of the last is the number + 1
of the first. So a bin waits in a time that does not depend on how many others do.
"""

from forge_packing.dividing.kernels._heap import Ints


def first_of_at_most(lengths: Ints, start: int, limit: int) -> int:
    """The first sample from `start` on that is no longer than `limit`, or the number of samples. Lengths descend."""
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
    """Put a bin at the end of a sample's ring."""
    last = waiting[sample]
    if last > 0:
        after[item] = after[last - 1]
        after[last - 1] = item + 1
    else:
        after[item] = item + 1
    waiting[sample] = item + 1


def first_waiting(waiting: Ints, after: Ints, sample: int) -> int:
    """Open a sample's ring into a line that 0 ends: the number + 1 of its first bin, or 0 where none waits."""
    last = waiting[sample]
    if last == 0:
        return 0
    first = after[last - 1]
    after[last - 1] = 0
    return first
