"""Best-fit decreasing, in n log n comparisons whatever the lengths and the capacity.

Lengths descend, so a row that has space for the current sample has space for every later one, until it gets one itself:
those rows are in a heap, the fullest first. The others wait for the first sample that is short enough.
"""

from forge_packing.dividing.kernels._heap import Ints, pop, push, zeros
from forge_packing.dividing.kernels._waiting import first_of_at_most, first_waiting, wait


def best_fit(lengths: Ints, capacity: int, row_of: Ints) -> int:
    """Pack each sample into the row in which it leaves the least space, else into a new one.

    Of equal rows the one begun first is taken, which makes no difference to their number. Returns the number of rows.
    """
    n = len(lengths)
    space = zeros(n)  # free tokens of each row, the keys of the heap
    fitting = zeros(n)
    fit = 0
    waiting = zeros(n)
    after = zeros(n)
    rows = 0
    for i in range(n):
        length = lengths[i]
        following = lengths[i + 1] if i + 1 < n else length
        entering = first_waiting(waiting, after, i)
        while entering > 0:
            fit = push(fitting, fit, space, entering - 1)
            entering = after[entering - 1]
        if fit > 0:
            row = fitting[0]
            space[row] -= length
            # The fullest row is fuller now: where the next sample still fits into it, it stays the first.
            if space[row] >= following:
                row_of[i] = row
                continue
            fit = pop(fitting, fit, space)
        else:
            row = rows
            rows += 1
            space[row] = capacity - length
        row_of[i] = row
        if space[row] >= following:
            fit = push(fitting, fit, space, row)
        elif space[row] >= lengths[n - 1]:  # else no later sample fits into it
            wait(waiting, after, first_of_at_most(lengths, i + 2, space[row]), row)
    return rows
