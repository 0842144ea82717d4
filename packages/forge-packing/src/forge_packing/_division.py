"""The lengths of steps to micro-batches of at most `max_tokens`, the same number on every rank."""

import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_RANKS, MAX_TOKENS, Int64Array, sample_lengths, whole_number
from forge_packing._compile import run
from forge_packing._cost import DEFAULT_COST, Cost, integer_costs
from forge_packing._errors import PackingError


def divide(
    lengths: npt.ArrayLike, *, max_tokens: int, world_size: int = 1, cost: Cost = DEFAULT_COST
) -> list[list[Int64Array]]:
    """One step's samples over ranks and micro-batches: the result is indexed [rank][micro-batch].

    lengths: B integers, each from 1 to max_tokens. Every rank has the same number of micro-batches (collectives need
    that), where there is no work an empty one. Each is an ascending int64 array of indices into `lengths`; every index
    comes once. As few micro-batches as are found, and of those the least makespan (`Cost`); the dearest come first.
    Takes B log B comparisons. Raises PackingError.

    >>> for rank in divide([4, 3, 3, 2, 2], max_tokens=6, world_size=2):
    ...     print([micro_batch.tolist() for micro_batch in rank])
    [[1, 4], [3]]
    [[0], [2]]
    """
    max_tokens = whole_number("max_tokens", max_tokens, 1, MAX_TOKENS)
    world_size = whole_number("world_size", world_size, 1, MAX_RANKS)
    if not isinstance(cost, Cost):
        raise PackingError(f"cost must be a Cost, got {cost!r} ({type(cost).__name__}). Give Cost(...) or Cost.for_model(...)")
    passes = divide_step(sample_lengths(lengths, max_tokens, "max_tokens"), max_tokens, world_size, cost)
    return [[row[rank] for row in passes] for rank in range(world_size)]


def divide_step(
    lengths: Int64Array,
    max_tokens: int,
    world_size: int,
    cost: Cost = DEFAULT_COST,
) -> list[list[Int64Array]]:
    """`divide` without its checks, indexed [micro-batch][rank]. lengths: int64[B]."""
    step_starts = np.array([0, lengths.size], dtype=np.int64)
    order, starts, pass_starts = divide_steps(lengths, step_starts, max_tokens, world_size, cost)
    rows = np.split(order, starts[1:-1])
    return [rows[at : at + world_size] for at in range(0, int(pass_starts[-1]) * world_size, world_size)]


def divide_steps(
    lengths: Int64Array, step_starts: Int64Array, max_tokens: int, world_size: int, cost: Cost
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Many steps at once, each as `divide_step` would have it, without checks.

    lengths: int64[P], step after step, each from 1 to max_tokens. step_starts: int64[steps+1], from 0 to P, rising.
    Returns (order int64[P], micro_batch_starts int64[M+1], pass_starts int64[steps+1]): positions in `lengths`,
    micro-batch after micro-batch (by step, pass, rank), ascending within each; where each micro-batch starts in them; and
    each step's first pass, of `world_size` micro-batches. M is pass_starts[-1] * world_size.
    """
    step_of = np.repeat(np.arange(step_starts.size - 1), np.diff(step_starts))
    # Longest first within each step, equal lengths as they came. One sort of one key for all steps.
    by_length = np.argsort(step_of * (MAX_TOKENS + 1) - lengths, kind="stable")
    sorted_lengths = lengths[by_length]
    costs = integer_costs(cost, sorted_lengths, step_starts)
    slot_of = np.zeros(lengths.size, dtype=np.int64)
    passes = np.zeros(step_starts.size - 1, dtype=np.int64)
    run("divide_all", (sorted_lengths, costs, step_starts), (world_size, max_tokens), slot_of, passes)
    pass_starts = np.concatenate([[0], np.cumsum(passes)])
    micro_batch_of = np.empty_like(slot_of)
    micro_batch_of[by_length] = slot_of + pass_starts[step_of] * world_size
    sizes = np.bincount(micro_batch_of, minlength=int(pass_starts[-1]) * world_size)
    return np.argsort(micro_batch_of, kind="stable"), np.concatenate([[0], np.cumsum(sizes)]), pass_starts
