"""Steps to slots: each sample of a step to a pass and a rank, by the best of several divisions."""

from forge_packing.dividing.kernels._fill import pack
from forge_packing.dividing.kernels._heap import Ints, zeros
from forge_packing.dividing.kernels._makespan import arrange
from forge_packing.dividing.kernels._refine import refine
from forge_packing.dividing.kernels._spread import greedy, levels, spread


def least_passes(lengths: Ints, ranks: int, capacity: int) -> int:
    """No division has fewer passes: all tokens must have room, and no bin holds two samples of more than half of it."""
    total = 0
    big = 0
    for length in lengths:
        total += length
        if 2 * length > capacity:
            big += 1
    rows = max(-(-total // capacity), big)
    return -(-rows // ranks)


def divide_one(lengths: Ints, costs: Ints, ranks: int, capacity: int, slot_of: Ints) -> int:
    """One step's samples, longest first, to slots (pass * ranks + rank), written into `slot_of`. Returns the passes.

    As few passes as can be shown to do, else as few as best-fit decreasing, mini-trainer's packer, or a spread by cost
    find; then the division of that many passes with the least makespan, refined.
    """
    n = len(lengths)
    spreading, in_turn, in_rows = zeros(n), zeros(n), zeros(n)
    passes = least_passes(lengths, ranks, capacity)
    is_spread = spread(lengths, costs, ranks, capacity, levels(costs, passes, ranks), spreading)
    turns = greedy(lengths, ranks, capacity, in_turn)
    by_rows = 0
    if not is_spread:
        by_rows = -(-pack(lengths, capacity, passes * ranks, in_rows) // ranks)
        # A spread packs more loosely than best fit, but it may still manage with a pass less.
        for fewer in range(max(min(by_rows, turns) - 1, passes + 1), min(by_rows, turns) + 1):
            passes = fewer
            is_spread = spread(lengths, costs, ranks, capacity, levels(costs, passes, ranks), spreading)
            if is_spread:
                break
    total = 0
    for cost in costs:
        total += cost
    goal = -(-total // ranks)
    goal += goal // 1000  # a thousandth over the ideal is as good as equal
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


def divide_all(lengths: Ints, costs: Ints, step_starts: Ints, ranks: int, capacity: int, slot_of: Ints, passes: Ints) -> None:
    """Each step by itself: slots that count from 0 in every step, and each step's passes."""
    for step in range(len(step_starts) - 1):
        start, stop = step_starts[step], step_starts[step + 1]
        slots = zeros(stop - start)
        passes[step] = divide_one(lengths[start:stop], costs[start:stop], ranks, capacity, slots)
        for i in range(stop - start):
            slot_of[start + i] = slots[i]
