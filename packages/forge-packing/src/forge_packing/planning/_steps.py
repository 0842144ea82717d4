"""The steps of a run, ordered and divided block by block when they are first asked for.

A block is as many whole steps as hold about BLOCK samples: enough to profit from array operations, few enough that the
first step of a run of any length is there at once. The last few blocks are cached.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple, TypeVar

import attrs
import numpy as np

from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError
from forge_packing.dividing._cost import Cost
from forge_packing.dividing._divide import divide_steps
from forge_packing.dividing._padded import divide_padded
from forge_packing.dividing._prefixes import Prefixes
from forge_packing.ordering._order import Order

BLOCK = 2**14
"""Samples in a block, about."""

_CACHED = 4
"""Blocks of each kind that are cached."""

T = TypeVar("T")


class Ordered(NamedTuple):
    """Consecutive steps before they are divided."""

    first: int
    """The first step."""
    samples: Int64Array
    """int64[P]: sample indices, step after step."""
    step_starts: Int64Array
    """int64[steps+1]: where each step begins in `samples`."""


class Divided(NamedTuple):
    """Consecutive steps divided over ranks; a pass is one micro-batch on every rank."""

    ordered: Ordered
    """The same steps before the division."""
    members: Int64Array
    """int64[P]: positions in `ordered.samples`, micro-batch after micro-batch: by step, then pass, then rank."""
    micro_batch_starts: Int64Array
    """int64[passes*R+1]: where each micro-batch begins in `members`."""
    pass_starts: Int64Array
    """int64[steps+1]: the first pass of each step."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class Steps:
    """The steps of a run over R ranks, in cached blocks."""

    order: Order
    """Which samples form which step."""
    lengths: Int64Array
    """int64[N]: tokens of each sample of the data."""
    max_tokens: int
    """Tokens in a micro-batch at most."""
    world_size: int
    """R."""
    cost: Cost
    """What is balanced between ranks."""
    widths: Int64Array | None = None
    """int64[N]: places of each line of a sample, in micro-batches that are padded; None where nothing is."""
    lines: Int64Array | None = None
    """int64[N]: lines of each sample; None where nothing is padded."""
    prefixes: Prefixes | None = None
    """What samples begin with, where that is computed once a micro-batch."""
    repeated: Int64Array | None = None
    """int64[N]: tokens that each sample has twice and that take room once; None for none."""
    _ordered: dict[int, Ordered] = attrs.field(init=False, factory=dict, repr=False)
    _divided: dict[int, Divided] = attrs.field(init=False, factory=dict, repr=False)

    @cached_property
    def room(self) -> Int64Array:
        """int64[N]: tokens of each sample that take room, with what it begins with."""
        return self.lengths if self.repeated is None else self.lengths - self.repeated

    @property
    def per_block(self) -> int:
        """Steps in a block."""
        return max(1, min(BLOCK, BLOCK // self.order.batch_size))

    def ordered(self, number: int) -> Ordered:
        """Return the steps of one block, not divided."""
        return _cached(self._ordered, number, self._order_block)

    def divided(self, number: int) -> Divided:
        """Return the steps of one block, divided."""
        return _cached(self._divided, number, self._divide_block)

    def stretch(self, first: int, stop: int) -> Divided:
        """Divide the steps from first to stop, without caching them."""
        return self._divide_stretch(self._order_stretch(first, stop))

    def padded(self, samples: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return widths and lines of samples, of a plan that counts padding."""
        assert self.widths is not None
        assert self.lines is not None
        return self.widths[samples], self.lines[samples]

    def sums(self, values_N: Int64Array, first: int, stop: int) -> Int64Array:
        """Sum a value of each sample over the samples of each step: int64[stop-first]."""
        parts = [np.zeros(0, dtype=np.int64)]
        for number in range(first // self.per_block, -(-stop // self.per_block)):
            block = self.ordered(number)
            starts = block.step_starts[max(first - block.first, 0) : stop - block.first + 1]
            values = values_N[block.samples[starts[0] : starts[-1]]]
            parts.append(np.add.reduceat(values, starts[:-1] - starts[0]))
        return np.concatenate(parts)

    def micro_batches(self, step: int, rank: int) -> list[Int64Array]:
        """Return a rank's micro-batches of a step, in order, as new arrays of sample indices."""
        block = self.divided(step // self.per_block)
        within = step - block.ordered.first
        first, last = (int(block.pass_starts[within + at]) * self.world_size for at in (0, 1))
        starts = block.micro_batch_starts
        members = (block.members[starts[m] : starts[m + 1]] for m in range(first + rank, last, self.world_size))
        return [block.ordered.samples[places] for places in members]

    def sampled_blocks(self, most_steps: int | None) -> list[int]:
        """Choose ascending numbers of blocks, of about `most_steps` steps in all; None chooses all.

        The first and the last block are among them, the others evenly between; of an endless run, the first ones. Raises
        PackingError where all blocks of an endless run would be needed.
        """
        total = self.order.num_steps
        if most_steps is not None and most_steps < 1:
            raise PackingError(f"most_steps must be at least 1, got {most_steps}")
        if total is None:
            if most_steps is None:
                raise PackingError(
                    "an endless plan cannot be verified whole: give a number of steps, as in check(most_steps=1000)"
                )
            return list(range(-(-most_steps // self.per_block)))
        blocks = -(-total // self.per_block)
        most = blocks if most_steps is None else min(blocks, max(1, most_steps // self.per_block))
        return sorted({round(at) for at in np.linspace(0, blocks - 1, most).tolist()})

    def sampled_stretches(self, most_steps: int, most_stretches: int) -> list[tuple[int, int]]:
        """Choose (first, stop) of stretches of steps, of at most `most_steps` in all.

        They are spread evenly from the first step to the last; of an endless run, the first steps are one stretch.
        """
        total = self.order.num_steps
        if total is None or total <= most_steps:
            return [(0, most_steps if total is None else total)]
        count = min(most_stretches, most_steps)
        each = most_steps // count
        return [(first, first + each) for first in (at * (total - each) // max(count - 1, 1) for at in range(count))]

    def _order_block(self, number: int) -> Ordered:
        first = number * self.per_block
        stop = first + self.per_block
        if self.order.num_steps is not None:
            stop = min(stop, self.order.num_steps)
        return self._order_stretch(first, stop)

    def _divide_block(self, number: int) -> Divided:
        return self._divide_stretch(self.ordered(number))

    def _order_stretch(self, first: int, stop: int) -> Ordered:
        return Ordered(first, self.order.samples(first, stop), self.order.starts(first, stop))

    def _divide_stretch(self, ordered: Ordered) -> Divided:
        if self.widths is not None:
            widths_P, lines_P = self.padded(ordered.samples)
            return Divided(ordered, *divide_padded(widths_P, lines_P, ordered.step_starts, self.max_tokens, self.world_size))
        room_P, lengths_P = self.room[ordered.samples], self.lengths[ordered.samples]
        prefixes = None if self.prefixes is None else self.prefixes.pick(ordered.samples)
        shape = self.max_tokens, self.world_size, self.cost
        divided = divide_steps(room_P, ordered.step_starts, *shape, prefixes, keys=lengths_P)
        return Divided(ordered, *divided)


def _cached(cache: dict[int, T], number: int, make: Callable[[int], T]) -> T:
    """Return a block from the cache, or make it.

    Threads may make one twice; none sees an incomplete one.
    """
    found = cache.get(number)
    if found is None:
        found = make(number)
        if len(cache) >= _CACHED:
            cache.clear()
        cache[number] = found
    return found
