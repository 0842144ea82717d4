"""Local search: exchanges of samples between bins that make the makespan smaller.

A bin's samples are a linked list: `first[bin]` and `after[sample]` hold a sample's number + 1, or 0 at the end.
"""

from forge_packing.dividing.kernels._heap import Ints, descending, zeros
from forge_packing.dividing.kernels._makespan import bin_sums, makespan


def move(first: Ints, after: Ints, bin_of: Ints, sample: int, target: int) -> None:
    """Move a sample (given as its number + 1) from its bin's list to the front of another's."""
    i = sample - 1
    source = bin_of[i]
    at = first[source]
    if at == sample:
        first[source] = after[i]
    else:
        while after[at - 1] != sample:
            at = after[at - 1]
        after[at - 1] = after[i]
    after[i] = first[target]
    first[target] = sample
    bin_of[i] = target


def seek_pair(
    lengths: Ints,
    costs: Ints,
    first: Ints,
    after: Ints,
    giver: int,
    taker: int,
    space: int,
    room: int,
    limit: int,
    found: Ints,
) -> int:
    """Search the exchange that moves most cost, at most `limit`, from `giver` to `taker`.

    It exchanges a sample of `giver` for a cheaper one of `taker`, or for none. One that moves more than found[0], and adds at
    most `room` tokens to the taker and `space` to the giver, is written into `found`: the cost that it moves, the two samples'
    numbers + 1 (0 for none), and the taker. Returns the number of pairs examined.
    """
    looked = 1
    x = first[giver]
    while x > 0:
        i = x - 1
        x = after[i]
        if costs[i] <= found[0]:
            continue
        if costs[i] <= limit and lengths[i] <= room:
            found[0] = costs[i]
            found[1] = i + 1
            found[2] = 0
            found[3] = taker
        y = first[taker]
        while y > 0:
            j = y - 1
            y = after[j]
            looked += 1
            moved = costs[i] - costs[j]
            more = lengths[i] - lengths[j]
            if found[0] < moved <= limit and -space <= more <= room:
                found[0] = moved
                found[1] = i + 1
                found[2] = j + 1
                found[3] = taker
    return looked


def costliest_two(sums: Ints, order: Ints, start: int, ranks: int) -> tuple[int, int]:
    """Return the places in `order` of the two costliest bins of the pass beginning at `start`."""
    best, second = start, start + 1
    if sums[order[second]] > sums[order[best]]:
        best, second = second, best
    for at in range(start + 2, start + ranks):
        value = sums[order[at]]
        if value > sums[order[best]]:
            second = best
            best = at
        elif value > sums[order[second]]:
            second = at
    return best, second


def refine(lengths: Ints, costs: Ints, ranks: int, capacity: int, bin_of: Ints, bins: int, goal: int, work: int) -> int:
    """Take cost from the costliest bin of each pass by exchanges; return the makespan.

    A bin takes no more than it lies below the costliest of its own pass, so no exchange makes the makespan larger. Ends at
    `goal`, after a round without success, or after about `work` pairs. With one rank nothing can be gained.
    """
    sums = bin_sums(costs, bin_of, bins)
    value = makespan(sums, bins, ranks)
    if ranks == 1:
        return value
    loads = bin_sums(lengths, bin_of, bins)
    first = zeros(bins)  # number + 1 of the first sample of each bin, 0 for none
    after = zeros(len(lengths))
    for i in range(len(lengths) - 1, -1, -1):
        after[i] = first[bin_of[i]]
        first[bin_of[i]] = i + 1
    tops = zeros(bins // ranks)
    found = zeros(4)
    better = True
    while better and value > goal and work > 0:
        better = False
        order = descending(sums, bins)
        for k in range(bins // ranks):
            tops[k] = sums[order[k * ranks]]
        for k in range(bins // ranks):
            if work <= 0:
                break
            best, second = costliest_two(sums, order, k * ranks, ranks)
            giver = order[best]
            mean = 0
            for at in range(k * ranks, k * ranks + ranks):
                mean += sums[order[at]]
            # Where bins are nearly equal, more may be given than brings this one down to the next.
            reach = max(sums[giver] - sums[order[second]], sums[giver] - mean // ranks)
            found[0] = 0
            for at in range(bins):
                b = order[at]
                slack = tops[at // ranks] - sums[b]
                if at // ranks == k:
                    slack //= 2  # what the giver loses also lowers the top of the pass, against which the taker is measured
                limit = min(reach, slack)
                work -= 1
                if work <= 0:
                    break
                if limit > found[0] and b != giver:
                    space, room = capacity - loads[giver], capacity - loads[b]
                    work -= seek_pair(lengths, costs, first, after, giver, b, space, room, limit, found)
            if found[0] > 0:
                taker = found[3]
                sums[giver] -= found[0]
                sums[taker] += found[0]
                tokens = lengths[found[1] - 1]
                move(first, after, bin_of, found[1], taker)
                if found[2] > 0:
                    tokens -= lengths[found[2] - 1]
                    move(first, after, bin_of, found[2], giver)
                loads[giver] -= tokens
                loads[taker] += tokens
                best, second = costliest_two(sums, order, k * ranks, ranks)
                tops[k] = sums[order[best]]
                better = True
        value = makespan(sums, bins, ranks)
    return value
