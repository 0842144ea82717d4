"""Prompts → what different ones begin with alike, such as a system prompt."""

from bisect import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Beginnings:
    """What G prompts begin with alike, which a row has once.

    >>> system = list(range(100, 120))
    >>> found = Beginnings([[*system, 5], [7, 8], [*system, 6, 9]], least=16)
    >>> found.tokens.tolist(), found.order.tolist()
    ([21, 2, 22], [1, 0, 2])
    >>> found.added([2, 1, 0]).tolist()  # the last one adds its own token to what the first has
    [22, 2, 1]
    """

    tokens: Indices
    """int64[G]: tokens of each prompt."""
    order: Indices
    """int64[G]: the prompts in an order in which those that begin alike are neighbours."""

    def __init__(self, prompts: Sequence[Any], least: int) -> None:
        """Compare prompts, int[S] each; what they have in common counts from `least` tokens on."""
        arrays = [np.asarray(prompt, np.int64) for prompt in prompts]
        keys = [array.tobytes() for array in arrays]
        self.tokens = np.array([len(array) for array in arrays], np.int64)
        # In an order of strings none has more in common with one before it than with its neighbour.
        self.order = np.array(sorted(range(len(keys)), key=keys.__getitem__), np.int64)
        self._place = np.argsort(self.order)
        common = [0, *(_common(arrays[one], arrays[other]) for one, other in zip(self.order, self.order[1:], strict=False))]
        self._common = np.where(np.array(common, np.int64) < least, 0, common)
        """int64[G], in that order: tokens that each has in common with the one before it."""

    @property
    def any(self) -> bool:
        """Whether any two prompts begin alike."""
        return bool(self._common.any())

    def added(self, prompts: Sequence[int] | Indices) -> Indices:
        """Count the tokens that each prompt adds to a row of those before it: int64[len(prompts)].

        No prompt comes twice.
        """
        seen: list[int] = []
        found = self.tokens[np.asarray(prompts, np.int64)]
        for at, place in enumerate(self._place[np.asarray(prompts, np.int64)].tolist()):
            left = bisect(seen, place)
            near = seen[max(0, left - 1) : left + 1]
            found[at] -= max((self._between(place, other) for other in near), default=0)
            seen.insert(left, place)
        return found

    def shared(self, ones: Indices, others: Indices) -> Indices:
        """Count the tokens that prompts have in common with others, one with one: int64[n]."""
        places, more = self._place[ones], self._place[others]
        return np.array([self._between(a, b) for a, b in zip(places.tolist(), more.tolist(), strict=True)], np.int64)

    def _between(self, place: int, other: int) -> int:
        low, high = sorted((place, other))
        return int(self._common[low + 1 : high + 1].min()) if low < high else int(self.tokens[self.order[low]])


def _common(one: Indices, other: Indices) -> int:
    size = min(len(one), len(other))
    same = one[:size] == other[:size]
    return size if same.all() else int(same.argmin())
