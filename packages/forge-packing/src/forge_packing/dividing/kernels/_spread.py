"""Spread by cost within the token budget, and the greedy packer of mini-trainer.

`lengths` and `costs` descend. Bin b belongs to pass b // ranks. The bin of each sample is written into `bin_of`.
"""

from forge_packing.dividing.kernels._heap import Ints, pop, push, sift_down, zeros
from forge_packing.dividing.kernels._waiting import first_of_at_most, first_waiting, wait


def levels(costs: Ints, passes: int, ranks: int) -> Ints:
    """Return what each pass should cost, descending, by water filling.

    The pass that holds the (k * ranks)th sample costs at least as much as that sample, so its other bins may be filled up to
    that at no cost. The rest of the work raises all lower passes to one level.
    """
    floors = zeros(passes)
    for k in range(passes):
        floors[k] = costs[k * ranks] if k * ranks < len(costs) else 0
    total = 0
    for cost in costs:
        total += cost
    target = -(-total // ranks)  # sum of the levels that holds all the work
    above = 0  # sum of the floors above the common level
    for k in range(passes):
        level = -(-(target - above) // (passes - k))
        if level >= floors[k]:
            for lower in range(k, passes):
                floors[lower] = level
            break
        above += floors[k]
    return floors


def spread(lengths: Ints, costs: Ints, ranks: int, capacity: int, aims: Ints, bin_of: Ints) -> bool:
    """Put each sample into the bin with room furthest below its aim; False if one fits nowhere.

    `aims` has an aim for each pass. With equal aims this is "longest processing time first" (Graham 1969) under a token
    budget. Bins with room are in queues, each ordered from the furthest below its aim, and only the first of each queue is in
    a heap: bins that take samples of one cost keep their order and form one queue, so there are about as many queues as
    costs, few enough for a cache however many bins there are. A bin without room for the next sample waits for the first
    that it can take, so every sample moves a bin twice at most: n log n.
    """
    n = len(lengths)
    bins = len(aims) * ranks
    keys = zeros(bins)  # cost so far less the aim
    loads = zeros(bins)  # tokens so far
    after = zeros(bins)  # number + 1 of the next bin of the same queue, 0 after the last
    for b in range(bins):
        keys[b] = -aims[b // ranks]
        after[b] = b + 2
    after[bins - 1] = 0  # aims descend, so all bins in order are one queue
    heap = zeros(bins)
    size = 1
    last = bins - 1  # the last bin of the queue that was joined last, -1 where that bin has left it
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
    """Append a bin to the queue ending with `last`, or begin a queue; return their number.

    It begins a queue where it is further below its aim than `last`, or where `last` is -1.
    """
    after[b] = 0
    if last >= 0 and (keys[last] < keys[b] or (keys[last] == keys[b] and last < b)):
        after[last] = b + 1
        return size
    return push(heap, size, keys, b)


def greedy(lengths: Ints, ranks: int, capacity: int, bin_of: Ints) -> int:
    """Put each sample on the emptiest rank, beginning a pass where it does not fit.

    This is mini-trainer's packer in one run over the samples: its search for the longest prefix that fits ends at the same
    sample, because a longer prefix never lowers a load. Returns the number of passes.
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
