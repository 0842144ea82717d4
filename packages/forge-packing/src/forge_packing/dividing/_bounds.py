"""Lower bounds that no packing can beat: rows, micro-batches of a rank, makespan of a step."""

import numpy as np
import numpy.typing as npt

from forge_packing._checks import Int64Array
from forge_packing.dividing._cost import Cost
from forge_packing.dividing._prefixes import Prefixes

_FUNCTIONS = range(2, 21)
"""The k of the dual feasible functions u^(k) that are tried."""


def row_bound(lengths: Int64Array, capacity: int) -> int:
    """Return a lower bound on the rows of any packing of lengths int64[N], each 1 to capacity.

    The best of: the tokens over the capacity; Martello and Toth's L2, which gives up on the space beside long samples that
    nothing of what is left fits into; and Fekete and Schepers' functions u^(k), which round a length up to what it blocks
    (a row has room for two samples of 34 %, not for 2.94).
    Source: Martello and Toth, Knapsack Problems, 1990, chapter 8; Fekete and Schepers, Math. Programming 91, 2001.
    """
    return max(_martello_toth(np.sort(lengths), capacity), *(_rounded(lengths, capacity, k) for k in _FUNCTIONS))


def micro_batch_bound(lengths: Int64Array, max_tokens: int, world_size: int) -> int:
    """Return a lower bound on a rank's micro-batches, for one step's lengths int64[B]."""
    return -(-row_bound(lengths, max_tokens) // world_size)


def makespan_bound(lengths: Int64Array, max_tokens: int, world_size: int, cost: Cost) -> float:
    """Return a lower bound on the makespan of lengths int64[B], in the unit of `cost`.

    Samples of more than half the budget lie in different micro-batches, so the (k * R)th longest of them is a floor for
    pass k, and their number caps how much of the rest fits beside them: a micro-batch without one is filled with samples of
    at most half the budget, which are cheap for their tokens. What has no room below the floors raises passes, by no more
    than R units of work for one unit of time. Nor does any rank do more than the makespan, the busiest one included. The bound
    includes the cost of each pass.
    """
    values = cost.of(lengths)
    total = float(values.sum())
    big = lengths * 2 > max_tokens
    descending = np.sort(values[big])[::-1]
    floors = descending[::world_size]
    longest_rest = float(lengths[~big].max(initial=0))
    # A micro-batch of max_tokens, all in samples as long as the longest of the rest: none without a big one costs more.
    others = max_tokens * (cost.per_token + cost.per_token_squared * longest_rest)
    held = float(np.repeat(floors, world_size)[: descending.size].sum())
    held += float(np.minimum(floors[-1:], others).sum()) * (floors.size * world_size - descending.size)
    least = float(floors.sum()) + max(0.0, total - held) / world_size
    least = max(least, _busiest_rank(values, world_size))
    return least + micro_batch_bound(lengths, max_tokens, world_size) * cost.per_micro_batch


def shared_bounds(lengths: Int64Array, prefixes: Prefixes, max_tokens: int, world_size: int, cost: Cost) -> tuple[int, float]:
    """Return both bounds where the samples of a step share prefixes.

    Those are a rank's micro-batches, and the makespan. Each prefix is computed once at least, and what a sample adds to its
    prefix always.
    """
    shared = prefixes.shared()
    own = lengths - shared
    used = np.unique(prefixes.of[prefixes.of >= 0])
    rows = max(row_bound(own, max_tokens), -(-int(own.sum() + prefixes.tokens[used].sum()) // max_tokens))
    values = cost.of(lengths) - cost.of(shared)
    total = float(values.sum() + cost.of(prefixes.tokens[used]).sum())
    least = max(total / world_size, _busiest_rank(values, world_size))
    fewest = -(-rows // world_size)
    return fewest, least + fewest * cost.per_micro_batch


def _busiest_rank(values: npt.NDArray[np.float64], world_size: int) -> float:
    """Return a lower bound on the work of the busiest rank, from the samples' costs.

    For every k, of the k*R + 1 costliest samples one rank has k + 1, which cost at least as much as the cheapest k + 1 of
    them. So the costliest sample (k = 0), however few the samples are; and all of them where there is one rank.
    """
    below = np.concatenate([[0.0], np.cumsum(np.sort(values)[::-1])])
    last = np.arange(0, values.size, world_size)
    return float((below[last + 1] - below[last - np.arange(last.size)]).max())


def _martello_toth(ascending: Int64Array, capacity: int) -> int:
    """Return Martello and Toth's bound L2.

    The best over all thresholds t up to half the capacity: each sample of more than half has a row of its own; those of t to
    half are packed, by their tokens, into the room beside long samples of at most capacity - t, then into further rows.
    """
    below = np.concatenate([[0], np.cumsum(ascending)])
    half = int(np.searchsorted(ascending, capacity // 2, side="right"))  # how many are at most half
    # t = 0 counts everything; then each length of at most half, from its first occurrence on.
    thresholds = np.concatenate([[0], np.unique(ascending[:half])])
    alone = np.searchsorted(ascending, capacity - thresholds, side="right")
    long = ascending.size - half
    room = (alone - half) * capacity - (below[alone] - below[half])
    small = below[half] - below[np.searchsorted(ascending, thresholds)]
    more = np.maximum(-(-(small - room) // capacity), 0)
    return long + int(more.max())


def _rounded(lengths: Int64Array, capacity: int, k: int) -> int:
    """Return the bound from u^(k).

    Of a length x as a share of the capacity: x stays where (k + 1) * x is a whole number, else becomes floor((k + 1) * x) / k.
    """
    blocks, rest = np.divmod(lengths * (k + 1), capacity)
    weights = np.where(rest == 0, blocks * k, blocks * (k + 1))  # in units of 1 / (k * (k + 1))
    return -(-int(weights.sum()) // (k * (k + 1)))
