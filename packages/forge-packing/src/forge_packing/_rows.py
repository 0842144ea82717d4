"""Lengths to rows of at most `capacity` tokens: best-fit decreasing, and an even spread over a given number of rows."""

import heapq
from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_TOKENS, Int64Array, sample_lengths, whole_number


def pack_rows(lengths: npt.ArrayLike, capacity: int) -> list[Int64Array]:
    """As few rows of at most `capacity` tokens as best-fit decreasing finds; never above 11/9 of the optimum plus 6/9.

    lengths: N integers, each from 1 to capacity. Returns int64 index arrays, each ascending; together they hold every
    index from 0 to N-1 once. Takes N log N comparisons. Raises PackingError for any other input.
    Source: Johnson, Near-optimal bin packing algorithms, MIT 1973; Dósa et al., Tight absolute bound for FFD, 2013.

    >>> [row.tolist() for row in pack_rows([51, 49, 49, 51], capacity=100)]
    [[0, 1], [2, 3]]
    """
    capacity = whole_number("capacity", capacity, 1, MAX_TOKENS)
    array = sample_lengths(lengths, capacity, "capacity").tolist()
    return [np.array(sorted(row), dtype=np.int64) for row in best_fit_decreasing(array, longest_first(array), capacity)]


def longest_first(lengths: list[int]) -> list[int]:
    """Indices by descending length, equal lengths in the order in which they came."""
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def best_fit_decreasing(lengths: list[int], order: list[int], capacity: int) -> list[list[int]]:
    """Rows of indices: each sample, longest first, goes where it leaves the least space; of equal rows, the oldest."""
    n = len(lengths)
    smallest = lengths[order[-1]]
    rows: list[list[int]] = []
    # space * n + row, ascending: one list of plain ints that bisect can search (a row's number is below n).
    spaces: list[int] = []
    for index in order:
        length = lengths[index]
        at = bisect_left(spaces, length * n)
        if at == len(spaces):
            space, row = capacity, len(rows)
            rows.append([])
        else:
            space, row = divmod(spaces.pop(at), n)
        rows[row].append(index)
        # A row that nothing fits into any more is not kept, which keeps the list short.
        if space - length >= smallest:
            insort(spaces, (space - length) * n + row)
    return rows


def even_spread(lengths: list[int], order: list[int], capacity: int, count: int) -> list[list[int]] | None:
    """`count` rows of indices: each sample, longest first, goes to the emptiest row. None where that breaks the budget."""
    rows: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, row) for row in range(count)]
    for index in order:
        load, row = loads[0]
        if load + lengths[index] > capacity:
            return None
        rows[row].append(index)
        heapq.heapreplace(loads, (load + lengths[index], row))
    return rows
