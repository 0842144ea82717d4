"""Samples, longest first, to bins: spread by cost within the token budget, and pass after pass as mini-trainer does.

`lengths` and `costs` descend. Bin b belongs to pass b // ranks. The answer is written into `bin_of`, a bin a sample.
"""

from forge_packing._kernels_heap import Ints, pop, push, sift_down, zeros


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

    With equal aims this is "longest processing time first" (Graham 1969) under a token budget. A bin without room for the
    next sample waits, ordered by room, until samples are short enough; it leaves the waiting line only for a sample that
    it can take, so every sample moves a bin twice at most: n log n.
    """
    n = len(lengths)
    bins = len(aims) * ranks
    keys = zeros(bins)  # cost so far less the aim
    loads = zeros(bins)  # tokens so far: the first of the waiting line has most room
    heap = zeros(bins)
    for b in range(bins):
        keys[b] = -aims[b // ranks]
        heap[b] = b  # aims descend, so this is in order
    size = bins
    waiting = zeros(bins)
    parked = 0
    for i in range(n):
        length = lengths[i]
        while parked > 0 and loads[waiting[0]] + length <= capacity:
            b = waiting[0]
            parked = pop(waiting, parked, loads)
            size = push(heap, size, keys, b)
        if size == 0:
            return False
        b = heap[0]
        bin_of[i] = b
        keys[b] += costs[i]
        loads[b] += length
        if i + 1 < n and loads[b] + lengths[i + 1] > capacity:
            size = pop(heap, size, keys)
            if loads[b] + lengths[n - 1] <= capacity:
                parked = push(waiting, parked, loads, b)
        else:
            sift_down(heap, size, keys)
    return True


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
