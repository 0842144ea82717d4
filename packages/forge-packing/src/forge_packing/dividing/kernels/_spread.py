"""Samples, longest first, to bins: spread by cost within the token budget, and pass after pass as mini-trainer does.

`lengths` and `costs` descend. Bin b belongs to pass b // ranks. The answer is written into `bin_of`, a bin a sample.
"""

from forge_packing.dividing.kernels._heap import Ints, pop, push, sift_down, zeros
from forge_packing.dividing.kernels._waiting import first_of_at_most, first_waiting, wait


def levels(costs: Ints, passes: int, ranks: int) -> Ints:
    """What each pass should cost, descending: water poured over the passes until it holds all the work.

    The pass that holds the (k * ranks)th sample costs at least as much as that sample, so its other bins may be filled
    as high at no price. The rest of the work raises all passes that lie lower to one level.
    """
    floors = zeros(passes)
    for k in range(passes):
        floors[k] = costs[k * ranks] if k * ranks < len(costs) else 0
    total = 0
    for cost in costs:
        total += cost
    target = -(-total // ranks)  # what the passes' levels have to add up to
    above = 0  # sum of the floors that stick out of the water
    for k in range(passes):
        level = -(-(target - above) // (passes - k))
        if level >= floors[k]:
            for under in range(k, passes):
                floors[under] = level
            break
        above += floors[k]
    return floors


def spread(lengths: Ints, costs: Ints, ranks: int, capacity: int, aims: Ints, bin_of: Ints) -> bool:
    """Each sample to the bin that is furthest below its pass's aim, of those that have room. False where one fits nowhere.

    With equal aims this is "longest processing time first" (Graham 1969) under a token budget. Bins with room stand in
    lines, each from the furthest below its aim, and only the first of each line is in a heap: samples of one cost leave
    their bins in the order in which they took them, so there are about as many lines as costs, few enough for a cache
    however many bins there are. A bin without room for the next sample waits for the first that it can take, so every
    sample moves a bin twice at most: n log n.
    """
    n = len(lengths)
    bins = len(aims) * ranks
    keys = zeros(bins)  # cost so far less the aim
    loads = zeros(bins)  # tokens so far
    after = zeros(bins)  # number + 1 of the next bin of the same line, 0 behind the last
    for b in range(bins):
        keys[b] = -aims[b // ranks]
        after[b] = b + 2
    after[bins - 1] = 0  # aims descend, so all bins in order are one line
    heap = zeros(bins)
    size = 1
    last = bins - 1  # the last bin of the line that was joined last, -1 where that bin has left it
    waiting = zeros(n)
    for i in range(n):
        entering = first_waiting(waiting, after, i)
        while entering > 0:
            b = entering - 1
            entering = after[b]
            size = join(heap, size, keys, after, last, b)
            last = b
        if size == 0:
            return False
        b = heap[0]
        if after[b] > 0:
            heap[0] = after[b] - 1
            sift_down(heap, size, keys)
        else:
            size = pop(heap, size, keys)
            if last == b:
                last = -1
        bin_of[i] = b
        keys[b] += costs[i]
        loads[b] += lengths[i]
        room = capacity - loads[b]
        if i + 1 < n and room < lengths[i + 1]:
            if room >= lengths[n - 1]:
                wait(waiting, after, first_of_at_most(lengths, i + 2, room), b)
        else:
            size = join(heap, size, keys, after, last, b)
            last = b
    return True


def join(heap: Ints, size: int, keys: Ints, after: Ints, last: int, b: int) -> int:
    """Put a bin behind the last one of a line, or, where it is further below its aim, into a line of its own.

    Returns how many lines there are.
    """
    after[b] = 0
    if last >= 0 and (keys[last] < keys[b] or (keys[last] == keys[b] and last < b)):
        after[last] = b + 1
        return size
    return push(heap, size, keys, b)


def greedy(lengths: Ints, ranks: int, capacity: int, bin_of: Ints) -> int:
    """Each sample to the emptiest rank of the pass; where that is over capacity the next pass begins. Returns the passes.

    This is mini-trainer's packer in one run over the samples: its search for the longest prefix that fits stops at the
    same sample, because what a longer prefix adds never lowers a load.
    """
    loads = zeros(ranks)
    heap = zeros(ranks)
    for rank in range(ranks):
        heap[rank] = rank
    passes = 1
    for i in range(len(lengths)):
        if loads[heap[0]] + lengths[i] > capacity:
            passes += 1
            for rank in range(ranks):
                loads[rank] = 0
                heap[rank] = rank
        bin_of[i] = (passes - 1) * ranks + heap[0]
        loads[heap[0]] += lengths[i]
        sift_down(heap, ranks, loads)
    return passes
