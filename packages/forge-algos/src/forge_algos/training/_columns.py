"""Columns: micro-batches that all ranks run together, agreed in a collective before a step.

The k-th micro-batches of all data shards are a column. A column in which no shard has anything to learn is skipped by all; in
the others every rank makes a pass, one with nothing to learn over a made-up row whose loss counts nothing: where weights are
gathered and gradients summed, a rank that made fewer passes would let the others wait without end.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from forge_algos._errors import PackedBatchError, UnevenRanksError
from forge_algos._parallel import Parallel
from forge_algos.objectives import Objective

_WIDTH = 64
"""Columns in the first collective; its length must not depend on how many micro-batches a
rank was given."""


@attrs.frozen(kw_only=True)
class Columns:
    """Counts of one step, or of one batch of an evaluation, on this rank and over all shards."""

    mine: list[float]
    """Terms of each of this rank's micro-batches: learned tokens, pairs, whatever the objective counts;
    the sum of their weights, if they have any."""
    everywhere: list[float]
    """Terms of each column."""
    count: float
    """Terms of all shards and columns; a whole number without weights."""
    tokens: int
    """All tokens of all shards."""
    samples: int
    """All rows of the data, of all shards."""

    @property
    def active(self) -> list[int]:
        """Columns in which some shard has something to learn."""
        return [k for k, count in enumerate(self.everywhere) if count]


def columns(micro_batches: Sequence[Any] | None, objective: Objective, parallel: Parallel) -> Columns | None:
    """Add up the counts of all data shards.

    Args:
        micro_batches: this rank's; None on a rank that has no more batches.
        objective: counts them.
        parallel: the ranks.

    Returns:
        Columns: the counts, or None if no shard has any batches.

    Raises:
        UnevenRanksError: some shards have batches left and others have not, or their numbers of micro-batches differ.
        PackedBatchError: a step is one batch in place of a list of them.
    """
    given_one: Any = micro_batches
    if micro_batches is not None and (not isinstance(given_one, Iterable) or isinstance(given_one, Mapping)):
        raise PackedBatchError(
            f"a step is a list of micro-batches, and this one is a {type(micro_batches).__name__}: give [[batch], [batch]] for "
            "two steps of a micro-batch each, [[batch, batch]] for one step of two"
        )
    given = [] if micro_batches is None else list(micro_batches)
    mine = [objective.count(batch) for batch in given]
    padded = [*mine[:_WIDTH], *[0] * (_WIDTH - len(mine))]
    about = [
        float(micro_batches is not None),
        len(mine),
        len(mine) ** 2,
        sum(objective.tokens(batch) for batch in given),
        sum(objective.samples(batch) for batch in given),
    ]
    present, number, squares, tokens, samples, *everywhere = parallel.sum([*about, *padded])
    shards = parallel.data_parallel_size
    if not present:
        return None
    if present != shards:
        raise UnevenRanksError(
            f"{shards - int(present)} of {shards} data shards have no batches left while the others have: give every rank "
            "equally many, empty ones where there is nothing for it"
        )
    # Equal numbers alone have a mean of squares that is the square of the mean; counts are exact in float64.
    if shards * squares != number**2:
        raise UnevenRanksError(
            f"this rank was given {len(mine)} micro-batches and the mean of {shards} data shards is {number / shards:g}: give "
            "every rank equally many, empty ones where there is nothing for it"
        )
    if len(mine) > _WIDTH:
        everywhere += parallel.sum(mine[_WIDTH:])
    counts = everywhere[: len(mine)]
    total = math.fsum(counts)
    count = int(total) if total.is_integer() else total
    return Columns(mine=mine, everywhere=counts, count=count, tokens=int(tokens), samples=int(samples))
