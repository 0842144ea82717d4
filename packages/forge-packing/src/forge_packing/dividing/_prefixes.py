"""What samples begin with alike, which takes room and work once in each micro-batch."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from forge_packing._checks import Int64Array, integer_array
from forge_packing._errors import PackingError
from forge_packing.dividing._cost import Cost


class Prefixes(NamedTuple):
    """What samples begin with."""

    of: Int64Array
    """int64[N]: number of each sample's prefix, -1 for none."""
    tokens: Int64Array
    """int64[G]: tokens of each prefix."""

    def pick(self, samples: Int64Array) -> "Prefixes":
        """Return the prefixes of samples."""
        return Prefixes(self.of[samples], self.tokens)

    def shared(self) -> Int64Array:
        """Return the tokens of each sample's prefix, 0 for none: int64[N]."""
        return np.append(self.tokens, 0)[self.of]

    def once(self, group_of: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Return (group, number of a prefix) for each prefix in each group; `group_of` is int64[N]."""
        has, numbers = self.of >= 0, max(1, self.tokens.size)
        found = np.unique(group_of[has] * numbers + self.of[has])
        return found // numbers, found % numbers

    def sizes(self, lengths: Int64Array, group_of: Int64Array, groups: int) -> Int64Array:
        """Count the tokens of groups of samples of these lengths, a prefix once in each."""
        sizes = np.zeros(groups, dtype=np.int64)
        np.add.at(sizes, group_of, lengths - self.shared())
        at, number = self.once(group_of)
        np.add.at(sizes, at, self.tokens[number])
        return sizes

    def costs(self, cost: Cost, lengths: Int64Array, group_of: Int64Array, groups: int) -> npt.NDArray[np.float64]:
        """Return the costs of groups of the samples, a prefix once in each: float64[groups]."""
        own = np.bincount(group_of, weights=cost.of(lengths) - cost.of(self.shared()), minlength=groups)
        at, number = self.once(group_of)
        return (own + np.bincount(at, weights=cost.of(self.tokens[number]), minlength=groups)).astype(np.float64)


def checked_prefixes(
    prefixes: npt.ArrayLike | None,
    prefix_tokens: npt.ArrayLike | None,
    lengths: Int64Array,
    repeated: Int64Array | None = None,
) -> Prefixes | None:
    """Return prefixes as int64 arrays; None where none are given.

    Of `repeated`, tokens that samples have twice, one of each counts.

    Raises PackingError for one without the other, numbers out of range, and samples that are no longer than their prefix.
    """
    if prefixes is None and prefix_tokens is None:
        return None
    if prefixes is None or prefix_tokens is None:
        raise PackingError("prefixes and prefix_tokens are given together: the prefix of each sample, and the tokens of each")
    of, tokens = integer_array("prefixes", prefixes), integer_array("prefix_tokens", prefix_tokens)
    if of.size != lengths.size:
        raise PackingError(f"prefixes must have one entry a sample: got {of.size} for {lengths.size} lengths")
    if (bad := np.flatnonzero(tokens < 1)).size:
        raise PackingError(f"prefix_tokens must be at least 1, found {tokens[bad[0]]} at index {bad[0]}")
    if (bad := np.flatnonzero((of < -1) | (of >= tokens.size))).size:
        raise PackingError(
            f"prefixes must be numbers below {tokens.size}, one of each of prefix_tokens, or -1 for none, found {of[bad[0]]} "
            f"at index {bad[0]}"
        )
    found = Prefixes(of, tokens)
    room = lengths if repeated is None else lengths - repeated
    if (bad := np.flatnonzero(found.shared() >= room)).size:
        at = bad[0]
        once = "" if repeated is None else f", {repeated[at]} of them twice,"
        raise PackingError(
            f"sample {at} has {lengths[at]} tokens{once} and a prefix of {found.shared()[at]}: it must have one more at least. "
            "Give it prefix -1"
        )
    return found


def checked_repeated(repeated: npt.ArrayLike | None, lengths: Int64Array) -> Int64Array | None:
    """Return tokens that samples have twice; PackingError where they are too many."""
    if repeated is None:
        return None
    found = integer_array("repeated", repeated)
    if found.size != lengths.size:
        raise PackingError(f"repeated must have one entry a sample: got {found.size} for {lengths.size} lengths")
    if (bad := np.flatnonzero((found < 0) | (2 * found >= lengths))).size:
        raise PackingError(
            f"sample {bad[0]} has {lengths[bad[0]]} tokens, of which it cannot have {found[bad[0]]} twice: repeated must be "
            "from 0 to less than half of the sample"
        )
    return found


def refuse_both(padded: object, **shared: object) -> None:
    """Raise PackingError for micro-batches that are padded and share tokens."""
    for name, given in shared.items():
        if padded is not None and given is not None:
            raise PackingError(f"widths and {name} are both given: lines of a padded micro-batch share nothing. Leave one out")
