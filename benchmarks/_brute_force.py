"""Optimal division of a few samples, by trying every partition."""

from collections.abc import Iterator

import numpy as np


def optimum(lengths: np.ndarray, costs: np.ndarray, max_tokens: int, ranks: int) -> tuple[int, float]:
    """Return the fewest micro-batches a rank, and the least makespan with so many.

    Tries Bell(len(lengths)) partitions: 4,140 for eight.
    """
    best: dict[int, float] = {}
    for rows in _partitions(lengths.tolist(), max_tokens):
        sums = sorted((float(costs[row].sum()) for row in rows), reverse=True)
        passes = -(-len(rows) // ranks)
        best[passes] = min(best.get(passes, np.inf), sum(sums[::ranks]))
    fewest = min(best)
    return fewest, best[fewest]


def _partitions(lengths: list[int], max_tokens: int) -> Iterator[list[list[int]]]:
    rows: list[list[int]] = []
    loads: list[int] = []

    def place(index: int) -> Iterator[list[list[int]]]:
        if index == len(lengths):
            yield rows
            return
        for at in range(len(rows)):
            if loads[at] + lengths[index] <= max_tokens:
                rows[at].append(index)
                loads[at] += lengths[index]
                yield from place(index + 1)
                loads[at] -= lengths[index]
                rows[at].pop()
        rows.append([index])
        loads.append(lengths[index])
        yield from place(index + 1)
        rows.pop()
        loads.pop()

    return place(0)
