"""The lengths of one step to micro-batches of at most `max_tokens`, the same number on every rank."""

import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_TOKENS, Int64Array, sample_lengths, whole_number
from forge_packing._rows import best_fit_decreasing, even_spread, longest_first


def divide(lengths: npt.ArrayLike, *, max_tokens: int, world_size: int = 1) -> list[list[Int64Array]]:
    """One step's samples over ranks and micro-batches: the result is indexed [rank][micro-batch].

    lengths: B integers, each from 1 to max_tokens. Every rank has the same number of micro-batches (collectives need
    that), where there is no work an empty one. Each is an ascending int64 array of indices into `lengths`; every index
    comes once. The heaviest come first, those of similar token counts side by side. Raises PackingError.

    >>> for rank in divide([4, 3, 3, 2, 2], max_tokens=6, world_size=2):
    ...     print([micro_batch.tolist() for micro_batch in rank])
    [[0], [2]]
    [[3, 4], [1]]
    """
    max_tokens = whole_number("max_tokens", max_tokens, 1, MAX_TOKENS)
    world_size = whole_number("world_size", world_size, 1)
    passes = divide_step(sample_lengths(lengths, max_tokens, "max_tokens").tolist(), max_tokens, world_size)
    return [[np.array(row[rank], dtype=np.int64) for row in passes] for rank in range(world_size)]


def divide_step(lengths: list[int], max_tokens: int, world_size: int) -> list[list[list[int]]]:
    """`divide` without its checks, on plain lists, indexed [micro-batch][rank].

    Best-fit decreasing says how few micro-batches will do; that number is rounded up to a multiple of the ranks. If the
    samples spread evenly over that many within the budget they do so: no rank idles while another has two rows' work,
    and the peak memory is the lowest. Else the rows of best-fit decreasing stand, with empty ones beside them.
    """
    order = longest_first(lengths)
    rows = best_fit_decreasing(lengths, order, max_tokens)
    count = -(-len(rows) // world_size) * world_size
    rows = even_spread(lengths, order, max_tokens, count) or [*rows, *([] for _ in range(count - len(rows)))]
    rows.sort(key=lambda row: -sum(lengths[index] for index in row))
    passes = [[sorted(row) for row in rows[start : start + world_size]] for start in range(0, count, world_size)]
    # Every other pass runs the other way, so that no rank has the heavier share each time (ranks that accumulate
    # gradients meet only at the end of the step).
    return [row if number % 2 == 0 else row[::-1] for number, row in enumerate(passes)]
