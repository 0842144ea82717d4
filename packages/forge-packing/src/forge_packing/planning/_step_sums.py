"""Sums of a value over the samples of each step, computed when they are asked for."""

import operator
from collections.abc import Iterator
from typing import Any, overload

import numpy as np

from forge_packing._checks import Int64Array
from forge_packing._errors import PackingError
from forge_packing.planning._steps import Steps


class StepSums:
    """Lazy sequence of sums: `sums[step]` is an int, `sums[10:20]` an int64 array.

    `np.asarray(sums)` and `sums.tolist()` hold the whole run. For an endless run they raise PackingError, as `len` does.
    """

    def __init__(self, steps: Steps, values_N: Int64Array) -> None:
        self._steps, self._values = steps, values_N

    def __len__(self) -> int:
        return num_steps(self._steps)

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Int64Array: ...

    def __getitem__(self, at: int | slice) -> int | Int64Array:
        if isinstance(at, slice):
            first, stop, stride = at.indices(len(self)) if self._steps.order.num_steps is not None else _endless(at)
            if stride < 1:
                raise IndexError(f"steps are asked for in their order, not with a stride of {stride}")
            return self._steps.sums(self._values, first, max(stop, first))[::stride]
        step = in_range("step", at, self._steps.order.num_steps)
        return int(self._steps.sums(self._values, step, step + 1)[0])

    def __iter__(self) -> Iterator[int]:
        size = self._steps.order.num_steps
        first = 0
        while size is None or first < size:
            stop = first + self._steps.per_block if size is None else min(first + self._steps.per_block, size)
            yield from self._steps.sums(self._values, first, stop).tolist()
            first = stop

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self[:].astype(np.int64 if dtype is None else dtype, copy=False)

    def tolist(self) -> list[int]:
        """Return the sums of all steps as ints."""
        return self[:].tolist()


def _endless(at: slice) -> tuple[int, int, int]:
    first, stop = 0 if at.start is None else at.start, at.stop
    if stop is None or first < 0 or stop < 0:
        raise PackingError(
            f"an endless plan has no last step: give the slice an end, as in [{max(first, 0)}:{max(first, 0) + 10}]"
        )
    return first, stop, 1 if at.step is None else at.step


def num_steps(steps: Steps) -> int:
    """Return the number of steps in the run. PackingError where it is endless."""
    if steps.order.num_steps is None:
        raise PackingError("this plan is endless: epochs=None and no max_steps. Ask it by step, or give max_steps to plan()")
    return steps.order.num_steps


def in_range(name: str, value: int, size: int | None) -> int:
    """Return the value as an int from 0 to size-1; IndexError for any other, negative ones too.

    A negative step would silently be another one.
    """
    place = operator.index(value)
    if place < 0 or (size is not None and place >= size):
        has = "any number from 0" if size is None else f"{size} ({name} 0 to {size - 1})"
        raise IndexError(f"{name} {place} is out of range: this plan has {has}")
    return place
