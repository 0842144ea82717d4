"""An order and a division to the steps of a run, worked out a block of steps at a time, when they are asked for.

A block is as many whole steps as hold about BLOCK samples: enough that arrays pay, few enough that the first step of a
run of any length is there at once. The last few blocks are kept.
"""

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import attrs
import numpy as np

from forge_packing._checks import Int64Array
from forge_packing.dividing._cost import Cost
from forge_packing.dividing._divide import divide_steps
from forge_packing.ordering._order import Order

BLOCK = 2**14
_KEPT = 4
T = TypeVar("T")


class Ordered(NamedTuple):
    """Consecutive steps, before they are divided."""

    first: int
    """The first step."""
    samples: Int64Array
    """int64[P]: samples, step after step."""
    step_starts: Int64Array
    """[steps+1]: where each step begins in them."""


class Divided(NamedTuple):
    """The same steps over ranks and micro-batches. A pass is one micro-batch on every rank."""

    ordered: Ordered
    members: Int64Array
    """int64[P]: places in `ordered.samples`, micro-batch after micro-batch: by step, then pass, then rank."""
    micro_batch_starts: Int64Array
    """[passes*R+1]: where each micro-batch begins in the members."""
    pass_starts: Int64Array
    """[steps+1]: each step's first pass."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class Steps:
    """The steps of a run over R ranks."""

    order: Order
    lengths: Int64Array
    max_tokens: int
    world_size: int
    cost: Cost
    _ordered: dict[int, Ordered] = attrs.field(init=False, factory=dict, repr=False)
    _divided: dict[int, Divided] = attrs.field(init=False, factory=dict, repr=False)

    @property
    def per_block(self) -> int:
        """Steps in a block."""
        return max(1, min(BLOCK, BLOCK // self.order.batch_size))

    def ordered(self, number: int) -> Ordered:
        """The block of this number, its samples only."""
        return _kept(self._ordered, number, self._order_block)

    def divided(self, number: int) -> Divided:
        """The block of this number, divided."""
        return _kept(self._divided, number, self._divide_block)

    def stretch(self, first: int, stop: int) -> Divided:
        """The steps from first to stop, divided, for once: they are not kept."""
        return self._divide_stretch(self._order_stretch(first, stop))

    def sums(self, values_N: Int64Array, first: int, stop: int) -> Int64Array:
        """int64[stop-first]: the sum over each step's samples of their values."""
        parts = [np.zeros(0, dtype=np.int64)]
        for number in range(first // self.per_block, -(-stop // self.per_block)):
            block = self.ordered(number)
            starts = block.step_starts[max(first - block.first, 0) : stop - block.first + 1]
            values = values_N[block.samples[starts[0] : starts[-1]]]
            parts.append(np.add.reduceat(values, starts[:-1] - starts[0]))
        return np.concatenate(parts)

    def micro_batches(self, step: int, rank: int) -> list[Int64Array]:
        """The rank's micro-batches of the step, in the order in which they are run, as fresh arrays of samples."""
        block = self.divided(step // self.per_block)
        within = step - block.ordered.first
        first, last = (int(block.pass_starts[within + at]) * self.world_size for at in (0, 1))
        starts = block.micro_batch_starts
        members = (block.members[starts[m] : starts[m + 1]] for m in range(first + rank, last, self.world_size))
        return [block.ordered.samples[places] for places in members]

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
        lengths_P = self.lengths[ordered.samples]
        return Divided(ordered, *divide_steps(lengths_P, ordered.step_starts, self.max_tokens, self.world_size, self.cost))


def _kept(cache: dict[int, T], number: int, make: Callable[[int], T]) -> T:
    """Look a block up or make it. Threads may make one twice, and never see a half-made one."""
    found = cache.get(number)
    if found is None:
        found = make(number)
        if len(cache) >= _KEPT:
            cache.clear()
        cache[number] = found
    return found
