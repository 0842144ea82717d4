"""Minimum bin slack: rows filled one after another, each as full as a short search finds.

Takes more time than best fit, and often a row less where the budget is tight. Source, the minimum bin slack heuristic:
Gupta and Ho, Production Planning & Control 10, 1999; Fleszar and Hindi, Computers & Operations Research 29, 2002.
"""

from forge_packing.dividing.kernels._best_fit import best_fit
from forge_packing.dividing.kernels._heap import Ints, zeros
from forge_packing.dividing.kernels._waiting import first_of_at_most

# Sets that are tried for one row; more make no measurable difference on lengths of chats.
TRIES = 100
# Beyond so many samples a row less is a fraction of a percent, and best fit leaves hardly any to save.
MOST = 2_048


def next_left(lengths: Ints, left: Ints, start: int, limit: int) -> int:
    """Find the first unplaced sample from `start` on no longer than `limit`, or n for none.

    `left` is a union-find forest: it leads from each sample to the next unplaced one (itself if it is), with path halving.
    """
    low = first_of_at_most(lengths, start, limit)
    while left[low] != low:
        left[low] = left[left[low]]
        low = left[low]
    return low


def fill(lengths: Ints, capacity: int, row_of: Ints) -> int:
    """Fill rows one after another; return their number.

    The longest unplaced sample begins a row; the set of others that leaves the least space completes it. Sets are tried in
    order of their longest samples, so the first is what first fit takes.
    """
    n = len(lengths)
    left = zeros(n + 1)
    for i in range(n + 1):
        left[i] = i
    chosen = zeros(n)
    kept = zeros(n)
    rows = 0
    longest = 0
    while longest < n:
        row_of[longest] = rows
        left[longest] = longest + 1
        space = capacity - lengths[longest]
        least = space + 1
        depth = 0
        count = 0
        at = longest + 1
        for _ in range(TRIES):
            at = next_left(lengths, left, at, space)
            while at < n:
                chosen[depth] = at
                depth += 1
                space -= lengths[at]
                at = next_left(lengths, left, at + 1, space)
            if space < least:
                least = space
                count = depth
                for place in range(depth):
                    kept[place] = chosen[place]
            if least == 0 or depth == 0:
                break
            # Go on without the last sample and those of its length.
            depth -= 1
            length = lengths[chosen[depth]]
            space += length
            at = next_left(lengths, left, chosen[depth] + 1, length - 1)
        for place in range(count):
            row_of[kept[place]] = rows
            left[kept[place]] = kept[place] + 1
        rows += 1
        longest = next_left(lengths, left, longest, capacity)
    return rows


def pack(lengths: Ints, capacity: int, fewest: int, row_of: Ints) -> int:
    """Pack by best fit and, unless it reaches `fewest` rows, by `fill`; keep the fewer rows.

    Returns their number.
    """
    rows = best_fit(lengths, capacity, row_of)
    n = len(lengths)
    if fewest < rows and n <= MOST:
        filled = zeros(n)
        count = fill(lengths, capacity, filled)
        if count < rows:
            rows = count
            for i in range(n):
                row_of[i] = filled[i]
    return rows
