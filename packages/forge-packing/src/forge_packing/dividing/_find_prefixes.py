"""Samples' tokens → what they begin with alike, by number."""

import hashlib
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from forge_packing._checks import Int64Array, integer_array
from forge_packing._errors import PackingError
from forge_packing.collating._groups import LEAST_PREFIX
from forge_packing.dividing._prefixes import Prefixes

_LEAST_PART = 512
"""One sample in so many begins with a prefix at least, and two: of rarer ones a step seldom has two."""
_LEAST_SAVING = 32
"""Prefixes are worth it where one token in so many need not be computed, if all samples were together."""
_AT_ONCE = 2**22
"""Tokens that are looked at together."""
_TRIED = 512
"""Samples of a family by which the one that it is compared with is chosen."""


class _Samples(NamedTuple):
    """Samples in one flat array."""

    ids: np.ndarray
    starts: Int64Array
    lengths: Int64Array

    def tokens(self, samples: Int64Array, first: int, size: int) -> np.ndarray:
        """Return the tokens `first` to `first + size` of samples that have them: [N, size]."""
        return sliding_window_view(self.ids, size)[self.starts[samples] + first]


def find_prefixes(
    ids: npt.ArrayLike, lengths: npt.ArrayLike, *, starts: npt.ArrayLike | None = None
) -> tuple[Int64Array, Int64Array] | None:
    """Find what samples begin with alike, such as a system prompt with its tools.

    Those prefixes are found that many samples have: one in 512 of them at least. It takes the time of reading them.

    Args:
        ids: T integers from 0, the tokens of all samples, one after another.
        lengths: N integers, the tokens of each sample.
        starts: N integers, where each sample begins in `ids`, for other orders; by default where the one before it ends.

    Returns:
        As `plan` takes them: `prefixes`, int64[N], and `prefix_tokens`, int64[G]; None where they would save less than a
        thirty-second of the tokens.

    Raises:
        PackingError: samples that reach beyond `ids`, or arguments that are no integers.


    >>> tools = list(range(100, 116))
    >>> found = find_prefixes([*tools, 5, 6, *tools, 7, 8, 9, 3, 4], [18, 19, 2])
    >>> found[0].tolist(), found[1].tolist()
    ([0, 0, -1], [16])
    """
    checked_lengths = integer_array("lengths", lengths)
    flat = np.asarray(ids)
    if flat.ndim != 1 or (flat.size and flat.dtype.kind not in "iu"):
        raise PackingError(f"ids must be a flat sequence of integers, got {flat.dtype}{list(flat.shape)}")
    first = np.append(0, np.cumsum(checked_lengths))[:-1] if starts is None else integer_array("starts", starts)
    if first.shape != checked_lengths.shape:
        raise PackingError(f"starts must have one entry a sample: got {first.size} for {checked_lengths.size} lengths")
    beyond = np.flatnonzero((first < 0) | (checked_lengths < 1) | (first + checked_lengths > flat.size))
    if beyond.size:
        at = beyond[0]
        raise PackingError(
            f"sample {at} is {checked_lengths[at]} tokens from {first[at]}, which are not among {flat.size} ids. "
            "Give the tokens of all samples, and their lengths"
        )
    samples = _Samples(flat, first, checked_lengths)
    prefixes = _numbered(checked_lengths.size, _families(samples))
    shared = prefixes.shared()
    saved = int(shared.sum()) - int(prefixes.tokens[np.unique(prefixes.of[prefixes.of >= 0])].sum())
    if not saved or saved * _LEAST_SAVING < int(checked_lengths.sum()):
        return None
    return prefixes.of, prefixes.tokens


class _Family(NamedTuple):
    """Samples that have their first tokens in common."""

    members: Int64Array
    depth: int
    """Tokens that they have in common at least."""
    below: int
    """Tokens of which none is known to be common: twice as many."""


class _Found(NamedTuple):
    """A prefix of `tokens` tokens, and the samples that begin with it."""

    members: Int64Array
    tokens: int

    @property
    def saved(self) -> int:
        """Tokens that are computed once instead of for each sample, if all are together."""
        return self.tokens * (self.members.size - 1)


def _families(samples: _Samples) -> list[_Found]:
    """Find prefixes, each with the samples that have it and no other.

    Samples are told apart after 16 tokens, 32, 64 and so on, and what is in a family stays together as long as its parts would
    save less by themselves.
    """
    least = max(2, -(-samples.lengths.size // _LEAST_PART))
    active = np.flatnonzero(samples.lengths > LEAST_PREFIX)
    parts = [active]
    levels: list[list[tuple[Int64Array, int]]] = []  # samples of each family, and the one above it that it is a part of
    depth, seen = LEAST_PREFIX, 0
    while parts:
        found: list[tuple[Int64Array, int]] = []
        for number, part in enumerate(parts):
            longer = part[samples.lengths[part] > depth]
            found += [(alike, number) for alike in _alike(samples, longer, seen, depth - seen) if alike.size >= least]
        levels.append(found)
        parts = [alike for alike, _ in found]
        depth, seen = 2 * depth, depth
    chosen: list[tuple[int, list[_Found]]] = []  # for each family of the level below: tokens saved, and how
    for level in range(len(levels) - 1, -1, -1):
        depth = LEAST_PREFIX << level
        inside: list[tuple[int, list[_Found]]] = [(0, []) for _ in levels[level]]
        if level + 1 < len(levels):
            for (_, above), (saved, families) in zip(levels[level + 1], chosen, strict=True):
                inside[above] = inside[above][0] + saved, inside[above][1] + families
        together = [_prefix(samples, _Family(members, depth, 2 * depth)) for members, _ in levels[level]]
        chosen = [
            max(parts, (whole.saved, [whole]), key=lambda each: each[0]) for parts, whole in zip(inside, together, strict=True)
        ]
    return [each for _, found in chosen for each in found]


def _alike(samples: _Samples, members: Int64Array, first: int, size: int) -> list[Int64Array]:
    """Divide samples by their tokens from `first` to `first + size`."""
    digests: dict[bytes, list[int]] = {}
    for some in _some(members, size):
        found = np.ascontiguousarray(samples.tokens(some, first, size))
        line, data = found.itemsize * size, found.data.cast("B")
        for at, sample in enumerate(some.tolist()):
            digest = hashlib.blake2b(data[at * line : (at + 1) * line], digest_size=16).digest()
            digests.setdefault(digest, []).append(sample)
    return [np.array(alike) for alike in digests.values()]


def _some(members: Int64Array, size: int) -> Iterator[Int64Array]:
    """Yield parts of `members` whose tokens, `size` of each, are looked at together."""
    each = max(1, _AT_ONCE // size)
    for at in range(0, members.size, each):
        yield members[at : at + each]


def _prefix(samples: _Samples, family: _Family) -> _Found:
    """Find the tokens that the most of a family have in common."""
    members = family.members
    few = members[:: -(-members.size // _TRIED)]
    # The first, the middle and the last: one of them may be by itself.
    like = [int(members[at]) for at in (0, members.size // 2, members.size - 1)]
    best = max(like, key=lambda sample: _saved(_common(samples, few, sample, family))[0])
    common = _common(samples, members, best, family)
    tokens = _saved(common)[1]
    return _Found(members[common >= tokens], tokens)


def _numbered(count: int, found: list[_Found]) -> Prefixes:
    of = np.full(count, -1, dtype=np.int64)
    for number, each in enumerate(found):
        of[each.members] = number
    return Prefixes(of, np.array([each.tokens for each in found], dtype=np.int64))


def _saved(common: Int64Array) -> tuple[int, int]:
    """Return how many tokens are saved at most, and the prefix with which.

    `common` is what each sample has in common.
    """
    descending = np.sort(common)[::-1]
    saved = descending * np.arange(descending.size)
    at = int(saved.argmax())
    return int(saved[at]), int(descending[at])


def _common(samples: _Samples, members: Int64Array, like: int, family: _Family) -> Int64Array:
    """Count the first tokens that members of a family have in common with one of them.

    The last token of a sample is none of them, so that something is left.
    """
    most = np.minimum(samples.lengths[members], min(family.below, int(samples.lengths[like]))) - 1
    found = most.copy()
    size = int(most.max()) - family.depth
    if size <= 0:
        return found
    pattern = samples.tokens(np.array([like]), family.depth, size)[0]
    # What follows a sample that ends before is compared too, and is none of its own; nothing follows the last of all.
    inside = samples.starts[members] + family.depth + size <= samples.ids.size
    for at in _some(np.flatnonzero(inside), size):
        same = samples.tokens(members[at], family.depth, size) == pattern
        alike = np.where(same.all(axis=1), size, same.argmin(axis=1))
        found[at] = np.minimum(most[at], family.depth + alike)
    for at in np.flatnonzero(~inside & (most > family.depth)).tolist():
        own = samples.tokens(members[at : at + 1], family.depth, int(most[at]) - family.depth)[0]
        same = pattern[: own.size] == own
        if not same.all():
            found[at] = family.depth + int(same.argmin())
    return found
