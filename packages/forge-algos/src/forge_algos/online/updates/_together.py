"""Division of a step: completions whose prompts have most in common are put together."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from forge_algos.online.updates._beginnings import Beginnings, Indices

Distribute = Callable[[Sequence[Indices], Sequence[int]], list[list[Indices]]]
"""Rows and their tokens → [data shard][micro-batch]."""


class Step(NamedTuple):
    """Completions of a step, and what limits the rows that they are put into."""

    completions: Indices
    """int64[b], in the order of their groups."""
    groups: Indices
    """int64[b]: the prompt of each."""
    tokens: Indices
    """int64[b]: tokens of each, without its prompt."""
    beginnings: Sequence[Beginnings]
    """Of the prompts: one, or two where completions are computed behind two prompts, in a row of each."""
    max_tokens: int
    """Of either row."""
    max_keys: int | None
    """Of either row, but for that of one completion; None is any number."""
    data_parallel_size: int

    def row_tokens(self, places: Indices) -> Indices:
        """Count the tokens of the row of completions behind each kind of prompts: int64[K].

        They are given by their places in the step.
        """
        prompts = np.unique(self.groups[places])
        own = int(self.tokens[places].sum())
        return np.array([own + int(each.added(prompts).sum()) for each in self.beginnings], np.int64)

    def prompt_tokens(self) -> Indices:
        """Return int64[K, b], the tokens of each completion's prompts."""
        return np.stack([each.tokens[self.groups] for each in self.beginnings])


def divide_alike(step: Step, plain: list[list[Indices]], distribute: Distribute) -> list[list[Indices]]:
    """Divide a step as `plain` does, or in rows of completions whose prompts begin alike.

    Of divisions that compute no more tokens than `plain`, in no more micro-batches, that is taken which has the fewest
    micro-batches, and of those the one with which the ranks are done first. Divisions are int64[m] places in the step:
    [data shard][micro-batch].
    """

    def judged(dealt: list[list[Indices]]) -> tuple[tuple[int, int], int]:
        """Return its micro-batches and the tokens that ranks wait for, and the tokens of all rows."""
        sizes = np.array([[int(step.row_tokens(row).sum()) for row in mine] for mine in dealt])
        return (sizes.shape[1], int(sizes.max(axis=0).sum())), int(sizes.sum())

    chosen = plain
    best, most = judged(plain)
    fewest = best[0]
    for rows in _divisions(step):
        dealt = distribute(rows, [int(step.row_tokens(row).sum()) for row in rows])
        found, tokens = judged(dealt)
        if found[0] <= fewest and tokens <= most and found < best:
            best, chosen = found, dealt
    return [[step.completions[row] for row in mine] for mine in chosen]


def _divisions(step: Step) -> Iterator[list[Indices]]:
    """Yield rows of neighbours, in an order in which prompts that begin alike are some."""
    whole = np.arange(len(step.groups))
    within = step.max_keys is None or (step.prompt_tokens().max(axis=0) + step.tokens).sum() <= step.max_keys
    if step.data_parallel_size == 1 and within and step.row_tokens(whole).max() <= step.max_tokens:
        yield [whole]
        return
    for each in step.beginnings if any(each.any for each in step.beginnings) else ():
        place = np.empty_like(each.order)
        place[each.order] = np.arange(len(place))
        sequence = np.argsort(place[step.groups], kind="stable")
        yield [np.sort(row) for row in _even_rows(step, sequence)]


def _even_rows(step: Step, sequence: Indices) -> list[Indices]:
    """Cut a sequence into few rows, a multiple of the ranks, which are as even as can be."""
    groups, own = step.groups[sequence], step.tokens[sequence]
    alone, added = step.prompt_tokens().max(axis=0)[sequence] + own, own.copy()
    begins = np.flatnonzero(groups[1:] != groups[:-1]) + 1
    added[begins] += np.max(
        [each.tokens[groups[begins]] - each.shared(groups[begins], groups[begins - 1]) for each in step.beginnings], axis=0
    )
    sums, keys = np.append(0, added.cumsum()), np.append(0, alone.cumsum())

    def cut(most: int) -> list[Indices]:
        """Fill rows of `most` tokens, in which there is room for any completion alone."""
        rows, at = [], 0
        while at < len(sequence):
            # The first completion of a row brings its whole prompt.
            stop = int(np.searchsorted(sums, most + sums[at] - alone[at] + added[at], "right")) - 1
            if step.max_keys is not None:
                stop = min(stop, int(np.searchsorted(keys, keys[at] + step.max_keys, "right")) - 1)
            rows.append(sequence[at : max(at + 1, stop)])
            at = max(at + 1, stop)
        return rows

    best = cut(step.max_tokens)
    number = -(-len(best) // step.data_parallel_size) * step.data_parallel_size
    low, high = int(alone.max()), step.max_tokens
    while low < high:
        middle = (low + high) // 2
        found = cut(middle)
        if len(found) <= number:
            best, high = found, middle
        else:
            low = middle + 1
    return best
