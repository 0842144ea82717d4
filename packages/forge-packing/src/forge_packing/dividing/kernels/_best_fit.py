"""Samples, longest first, to as few rows as best-fit decreasing finds, in n log n whatever the lengths and the capacity.

What is asked of the rows only becomes less, as lengths descend. So a row that has space for the sample at hand has it for
every later one, until it gets one itself: those rows stand in a heap, the fullest first. The others wait for the first
sample that is short enough.
"""

from forge_packing.dividing.kernels._heap import Ints, pop, push, zeros
from forge_packing.dividing.kernels._waiting import first_of_at_most, first_waiting, wait


def best_fit(lengths: Ints, capacity: int, row_of: Ints) -> int:
    """Each sample to the row that it leaves the least space in, else to a new one; of equal rows the one begun first.

    Which of equal rows is taken makes no difference to their number. Returns the number of rows.
    """
    n = len(lengths)
    space = zeros(n)  # a row's tokens that are left, which the fitting are ordered by
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
            # The fullest is fuller now: where it still fits the next one, it stays the first.
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
        elif space[row] >= lengths[n - 1]:  # else nothing fits into it any more
            wait(waiting, after, first_of_at_most(lengths, i + 2, space[row]), row)
    return rows
