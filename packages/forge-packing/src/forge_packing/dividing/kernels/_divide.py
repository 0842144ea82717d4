"""Division of a step: each sample → a slot (pass and rank), by the best of several ways."""

from forge_packing.dividing.kernels._fill import pack
from forge_packing.dividing.kernels._heap import Ints, zeros
from forge_packing.dividing.kernels._makespan import arrange
from forge_packing.dividing.kernels._refine import refine
from forge_packing.dividing.kernels._spread import greedy, levels, spread


def least_passes(lengths: Ints, ranks: int, capacity: int) -> int:
    """Return a lower bound on the passes.

    All tokens need room, and samples of more than half the capacity need a bin each.
    """
    total = 0
    big = 0
    for length in lengths:
        total += length
        if 2 * length > capacity:
            big += 1
    rows = max(-(-total // capacity), big)
    return -(-rows // ranks)


def divide_one(lengths: Ints, costs: Ints, ranks: int, capacity: int, slot_of: Ints) -> int:
    """Divide one step's samples into slots (pass * ranks + rank); return the passes.

    The slots are written into `slot_of`. The passes are as few as the lower bound where a spread by cost reaches it, else as
    few as best-fit decreasing, mini-trainer's packer, or a spread by cost find; of the divisions into that many passes, the
    one of least makespan is taken, refined.
    """
    n = len(lengths)
    spreading, in_turn, in_rows = zeros(n), zeros(n), zeros(n)
    passes = least_passes(lengths, ranks, capacity)
    is_spread = spread(lengths, costs, ranks, capacity, levels(costs, passes, ranks), spreading)
    turns = greedy(lengths, ranks, capacity, in_turn)
    by_rows = 0
    if not is_spread:
        by_rows = -(-pack(lengths, capacity, passes * ranks, in_rows) // ranks)
        # A spread packs more loosely than best fit, but it may still need a pass less.
        for fewer in range(max(min(by_rows, turns) - 1, passes + 1), min(by_rows, turns) + 1):
            passes = fewer
            is_spread = spread(lengths, costs, ranks, capacity, levels(costs, passes, ranks), spreading)
            if is_spread:
                break
    total = 0
    for cost in costs:
        total += cost
    goal = -(-total // ranks)
    goal += goal // 1000  # a thousandth over the ideal counts as ideal
    least = -1
    for candidate in range(3):
        if candidate == 0 and is_spread:
            bin_of = spreading
        elif candidate == 1 and turns == passes:
            bin_of = in_turn
        elif candidate == 2 and by_rows == passes:
            bin_of = in_rows
        else:
            continue
        value = refine(lengths, costs, ranks, capacity, bin_of, passes * ranks, goal, 64 * n + 4096)
        if least < 0 or value < least:
            least = value
            for i in range(n):
                slot_of[i] = bin_of[i]
        if least <= goal:
            break
    arrange(costs, ranks, passes * ranks, slot_of)
    return passes


def divide_all(
    lengths: Ints, costs: Ints, step_starts: Ints, capacities: Ints, most_passes: int, ranks: Ints, slot_of: Ints, passes: Ints
) -> None:
    """Divide each step by itself, by its own capacity and over its own ranks.

    Slots count from 0 in every step. Where that takes more than `most_passes`, it is divided over more ranks, and `ranks`
    changed; 0 allows any number.
    """
    for step in range(len(step_starts) - 1):
        start, stop = step_starts[step], step_starts[step + 1]
        slots = zeros(stop - start)
        passes[step] = divide_one(lengths[start:stop], costs[start:stop], ranks[step], capacities[step], slots)
        while 0 < most_passes < passes[step]:
            ranks[step] += 1
            passes[step] = divide_one(lengths[start:stop], costs[start:stop], ranks[step], capacities[step], slots)
        for i in range(stop - start):
            slot_of[start + i] = slots[i]
