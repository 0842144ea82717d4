"""Samples between bins, until no exchange that was tried makes the step's makespan smaller."""

from forge_packing.dividing.kernels._heap import Ints, descending, zeros
from forge_packing.dividing.kernels._makespan import bin_sums, makespan


def move(first: Ints, after: Ints, bin_of: Ints, sample: int, target: int) -> None:
    """Take a sample (its number + 1) out of its bin's list, and put it in front of another's."""
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
    lengths: Ints, costs: Ints, first: Ints, after: Ints, giver: int, taker: int, room: int, limit: int, found: Ints
) -> int:
    """The sample of `giver`, and the cheaper one of `taker` or none, whose exchange moves most cost, at most `limit`.

    What moves more than found[0], and adds at most `room` tokens to the taker, is written into `found`: the cost that it
    moves, the two samples' numbers + 1, and the taker. Returns how many pairs were looked at.
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
            if found[0] < moved <= limit and lengths[i] - lengths[j] <= room:
                found[0] = moved
                found[1] = i + 1
                found[2] = j + 1
                found[3] = taker
    return looked


def dearest_two(sums: Ints, order: Ints, start: int, ranks: int) -> tuple[int, int]:
    """Places in `order` of the dearest and the next dearest bin of the pass that starts there."""
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
    """Take work from the dearest bin of each pass: a sample, or one for a cheaper one of another bin. Returns the makespan.

    A bin takes no more than it lies below the dearest of its own pass, so no exchange makes the makespan larger. Ends at
    `goal`, after a round without success, or after about `work` pairs. One rank waits for nobody: nothing is done.
    """
    sums = bin_sums(costs, bin_of, bins)
    value = makespan(sums, bins, ranks)
    if ranks == 1:
        return value
    loads = bin_sums(lengths, bin_of, bins)
    first = zeros(bins)  # number + 1 of a bin's first sample, 0 for none
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
            best, second = dearest_two(sums, order, k * ranks, ranks)
            giver = order[best]
            mean = 0
            for at in range(k * ranks, k * ranks + ranks):
                mean += sums[order[at]]
            # Nearly equal bins go down one by one: more may be given than brings this one down to the next.
            reach = max(sums[giver] - sums[order[second]], sums[giver] - mean // ranks)
            found[0] = 0
            for at in range(bins):
                b = order[at]
                slack = tops[at // ranks] - sums[b]
                if at // ranks == k:
                    slack //= 2  # what the giver loses comes off the top that the taker is measured by
                limit = min(reach, slack)
                work -= 1
                if work <= 0:
                    break
                if limit > found[0] and b != giver:
                    work -= seek_pair(lengths, costs, first, after, giver, b, capacity - loads[b], limit, found)
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
                best, second = dearest_two(sums, order, k * ranks, ranks)
                tops[k] = sums[order[best]]
                better = True
        value = makespan(sums, bins, ranks)
    return value
