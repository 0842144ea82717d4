"""Makespan of a step: the sum over passes of the costliest bin's cost.

For given bins it is least when they are sorted by cost and cut into passes in that order, `ranks` bins a pass.
"""

from forge_packing.dividing.kernels._heap import Ints, descending, zeros


def bin_sums(values: Ints, bin_of: Ints, bins: int) -> Ints:
    """Sum the values of each bin's samples."""
    sums = zeros(bins)
    for i in range(len(values)):
        sums[bin_of[i]] += values[i]
    return sums


def makespan(sums: Ints, bins: int, ranks: int) -> int:
    """Return the least makespan of bins of these costs."""
    order = descending(sums, bins)
    total = 0
    for at in range(0, bins, ranks):
        total += sums[order[at]]
    return total


def arrange(costs: Ints, ranks: int, bins: int, slot_of: Ints) -> None:
    """Assign bins to slots, in place, the costliest to the first pass.

    So a run that lacks memory fails in its first pass. Within a pass the costliest goes to the rank that has had least so
    far: ranks that accumulate gradients communicate only at the end of a step, and should reach it together.
    """
    sums = bin_sums(costs, slot_of, bins)
    order = descending(sums, bins)
    slots = zeros(bins)
    lacks = zeros(ranks)  # minus the cost that a rank has had so far
    for start in range(0, bins, ranks):
        by_rank = descending(lacks, ranks)
        for at in range(ranks):
            rank = by_rank[at]
            slots[order[start + at]] = start + rank
            lacks[rank] -= sums[order[start + at]]
    for i in range(len(slot_of)):
        slot_of[i] = slots[slot_of[i]]
