"""The micro-batches of every rank → what the ranks run together, in one small collective before the first forward.

The k-th micro-batches of all ranks are a column. A column in which no rank has anything to learn is left out by all; in the
others every rank makes a pass, one with nothing to learn over a made-up row whose loss counts nothing: where weights are
gathered and gradients summed, a rank that made fewer passes would let the others wait for ever.
"""

from collections.abc import Sequence
from typing import Any

import attrs

from forge_algos._errors import UnevenRanksError
from forge_algos._parallel import Parallel
from forge_algos.objectives import Objective

_WIDTH = 64
"""Columns that fit into the first collective; its length must not depend on what a rank was given."""


@attrs.frozen(kw_only=True)
class Columns:
    """What one step, or one batch of an evaluation, holds on this rank and on all."""

    mine: list[int]
    """Terms of each of this rank's micro-batches: learned tokens, pairs, whatever the objective counts."""
    everywhere: list[int]
    """Terms of each column."""
    count: int
    """Terms of all ranks and columns."""
    tokens: int
    """All tokens of all ranks."""
    samples: int
    """All rows of the data, of all ranks."""

    @property
    def active(self) -> list[int]:
        """The columns in which some rank has something to learn."""
        return [k for k, count in enumerate(self.everywhere) if count]


def columns(micro_batches: Sequence[Any] | None, objective: Objective, parallel: Parallel) -> Columns | None:
    """Add up the ranks' counts; None stands for a rank that has no more batches, and is returned if no rank has any.

    Raises:
        UnevenRanksError: some ranks have batches left and others have not, or their numbers of micro-batches differ.
    """
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
    ranks = parallel.world_size
    if not present:
        return None
    if present != ranks:
        raise UnevenRanksError(
            f"{ranks - int(present)} of {ranks} ranks have no batches left while the others have: give every rank equally many, "
            "empty ones where there is nothing for it"
        )
    # Equal numbers alone have a mean of squares that is the square of the mean; counts are exact in float64.
    if ranks * squares != number**2:
        raise UnevenRanksError(
            f"this rank was given {len(mine)} micro-batches and the mean of {ranks} ranks is {number / ranks:g}: give every rank "
            "equally many, empty ones where there is nothing for it"
        )
    if len(mine) > _WIDTH:
        everywhere += parallel.sum(mine[_WIDTH:])
    counts = [int(count) for count in everywhere[: len(mine)]]
    return Columns(mine=mine, everywhere=counts, count=sum(counts), tokens=int(tokens), samples=int(samples))
