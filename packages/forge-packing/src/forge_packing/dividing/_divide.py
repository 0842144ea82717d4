"""Division of steps: lengths → as many micro-batches of at most `max_tokens` on every rank."""

from itertools import pairwise

import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_RANKS, MAX_TOKENS, Int64Array, checked_integer, sample_lengths
from forge_packing._errors import PackingError
from forge_packing.dividing._compile import run
from forge_packing.dividing._cost import DEFAULT_COST, Cost, integer_costs
from forge_packing.dividing._divide_shared import Given, slots_of_shared
from forge_packing.dividing._padded import checked_padding, divide_padded, fewest_bits
from forge_packing.dividing._prefixes import Prefixes, checked_prefixes, checked_repeated, refuse_both


def divide(
    lengths: npt.ArrayLike,
    *,
    max_tokens: int,
    world_size: int = 1,
    cost: Cost = DEFAULT_COST,
    widths: npt.ArrayLike | None = None,
    lines: npt.ArrayLike | None = None,
    prefixes: npt.ArrayLike | None = None,
    prefix_tokens: npt.ArrayLike | None = None,
    repeated: npt.ArrayLike | None = None,
) -> list[list[Int64Array]]:
    """Divide the samples of one step over ranks and micro-batches: result[rank][micro-batch].

    Every rank has the same number of micro-batches (collectives need that); one without work is empty. There are as few
    micro-batches as are found, and of those divisions the one of least makespan (`Cost`); the costliest come first. With
    prefixes that of least makespan is taken, which may have a micro-batch more. It takes B log B comparisons.

    Args:
        lengths: B integers, each from 1 to max_tokens.
        max_tokens: Tokens in one micro-batch at most.
        world_size: R, the ranks.
        cost: What is balanced between ranks.
        widths: As of `plan`, where micro-batches are padded.
        lines: As of `plan`.
        prefixes: As of `plan`, where what samples begin with is computed once a micro-batch.
        prefix_tokens: As of `plan`.
        repeated: As of `plan`, where samples have tokens twice that are computed once.

    Returns:
        Ascending int64 arrays of indices into `lengths`; every index comes once.

    Raises:
        PackingError: lengths, limits or a cost that cannot be used.


    >>> for rank in divide([4, 3, 3, 2, 2], max_tokens=6, world_size=2):
    ...     print([micro_batch.tolist() for micro_batch in rank])
    [[1, 4], [3]]
    [[0], [2]]
    """
    max_tokens = checked_integer("max_tokens", max_tokens, 1, MAX_TOKENS)
    world_size = checked_integer("world_size", world_size, 1, MAX_RANKS)
    if not isinstance(cost, Cost):
        raise PackingError(f"cost must be a Cost, got {cost!r} ({type(cost).__name__}). Give Cost(...) or Cost.for_model(...)")
    lengths_B = sample_lengths(lengths, max_tokens, "max_tokens")
    step_starts = np.array([0, lengths_B.size], dtype=np.int64)
    padded = checked_padding(widths, lines, lengths_B.size, max_tokens)
    twice = checked_repeated(repeated, lengths_B)
    room_B = lengths_B if twice is None else lengths_B - twice
    shared = checked_prefixes(prefixes, prefix_tokens, lengths_B, twice)
    refuse_both(padded, prefixes=shared, repeated=twice)
    if padded is None:
        order, starts, _ = divide_steps(room_B, step_starts, max_tokens, world_size, cost, shared, keys=lengths_B)
    else:
        order, starts, _ = divide_padded(*padded, step_starts, max_tokens, world_size)
    micro_batches = cut(order, starts)
    return [micro_batches[rank::world_size] for rank in range(world_size)]


def divide_steps(
    lengths: Int64Array,
    step_starts: Int64Array,
    max_tokens: int,
    world_size: int,
    cost: Cost,
    prefixes: Prefixes | None = None,
    *,
    keys: Int64Array | None = None,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Divide many steps at once, each as `divide` would alone, without checks.

    lengths: int64[P], step after step, each from 1 to max_tokens. step_starts: int64[steps+1], from 0 to P, rising. prefixes:
    those of the same samples. keys: int64[P], tokens of the same samples with what they have twice; by default `lengths`.
    Returns (order int64[P], micro_batch_starts int64[M+1], pass_starts int64[steps+1]): positions in `lengths`,
    micro-batch after micro-batch (by step, pass, rank), ascending within each; the start of each micro-batch in `order`; and
    the first pass of each step. A pass has `world_size` micro-batches, so M is pass_starts[-1] * world_size.
    """

    def slotting(
        tokens: Int64Array, costs: npt.NDArray[np.float64], starts: Int64Array, capacities: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        by_length = _longest_first(tokens, starts)
        sorted_costs = integer_costs(costs[by_length], starts)
        slots, ranks = np.zeros(tokens.size, dtype=np.int64), np.full(starts.size - 1, world_size, dtype=np.int64)
        passes = np.zeros_like(ranks)
        run("divide_all", (tokens[by_length], sorted_costs, starts, capacities), (0,), ranks, slots, passes)
        slot_of = np.empty_like(slots)
        slot_of[by_length] = slots
        return slot_of, passes

    if prefixes is None:
        whole = np.full(step_starts.size - 1, max_tokens, dtype=np.int64)
        micro_batch_of, passes = slotting(lengths, cost.of(lengths), step_starts, whole)
    else:
        whole = lengths if keys is None else keys
        given = Given(lengths, whole, prefixes, step_starts, max_tokens, world_size, cost, slotting)
        micro_batch_of, passes = slots_of_shared(given)
    pass_starts = np.concatenate([[0], np.cumsum(passes)])
    if passes.size > 1:
        micro_batch_of = micro_batch_of + np.repeat(pass_starts[:-1] * world_size, np.diff(step_starts))
    sizes = np.bincount(micro_batch_of, minlength=int(pass_starts[-1]) * world_size)
    return np.argsort(fewest_bits(micro_batch_of), kind="stable"), np.concatenate([[0], np.cumsum(sizes)]), pass_starts


def _longest_first(lengths: Int64Array, step_starts: Int64Array) -> Int64Array:
    """Sort positions by step, then longest first, ties in their order: int64[P]."""
    by_length = np.argsort(fewest_bits(lengths.max() - lengths), kind="stable")
    if step_starts.size == 2:
        return by_length
    step_of = fewest_bits(np.repeat(np.arange(step_starts.size - 1), np.diff(step_starts)))
    return by_length[np.argsort(step_of[by_length], kind="stable")]


def cut(array: Int64Array, starts: Int64Array) -> list[Int64Array]:
    """Cut an array at `starts` into views. np.split takes three times as long."""
    return [array[start:stop] for start, stop in pairwise(starts.tolist())]
