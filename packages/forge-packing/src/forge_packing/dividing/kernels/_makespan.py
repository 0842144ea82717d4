"""Bins to the makespan of a step, and bins to passes and ranks.

The makespan is the sum over passes of the dearest bin. For given bins it is least when they are sorted by cost and cut
into passes in that order: a pass is `ranks` neighbours of it.
"""

from forge_packing.dividing.kernels._heap import Ints, descending, zeros


def bin_sums(values: Ints, bin_of: Ints, bins: int) -> Ints:
    """The sum of each bin's values, one value a sample."""
    sums = zeros(bins)
    for i in range(len(values)):
        sums[bin_of[i]] += values[i]
    return sums


def makespan(sums: Ints, bins: int, ranks: int) -> int:
    """The least makespan of bins with these costs."""
    order = descending(sums, bins)
    total = 0
    for at in range(0, bins, ranks):
        total += sums[order[at]]
    return total


def arrange(costs: Ints, ranks: int, bins: int, slot_of: Ints) -> None:
    """Bins to slots, in place: the dearest in the first pass, so that a run that lacks memory fails at once.

    Within a pass the dearest goes to the rank that had least so far: ranks that accumulate gradients meet only at the end
    of a step, and should get there together.
    """
    sums = bin_sums(costs, slot_of, bins)
    order = descending(sums, bins)
    slots = zeros(bins)
    lacks = zeros(ranks)  # minus what a rank had so far
    for start in range(0, bins, ranks):
        by_rank = descending(lacks, ranks)
        for at in range(ranks):
            rank = by_rank[at]
            slots[order[start + at]] = start + rank
            lacks[rank] -= sums[order[start + at]]
    for i in range(len(slot_of)):
        slot_of[i] = slots[slot_of[i]]
