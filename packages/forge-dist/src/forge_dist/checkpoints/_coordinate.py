"""Plan of a run's saves, made by the first rank and kept while nothing changes."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from forge_dist._errors import CheckpointError
from forge_dist.checkpoints._divide import Description, chosen, describe, divide, ordered_names
from forge_dist.checkpoints._plan import Piece, StoredTensor

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks


class SharedPlan:
    """What this rank writes in each save, and on the first rank what all ranks write.

    The pieces hardly ever change: mostly a digest of them is all that a rank sends. Otherwise it sends a description (about a
    kilobyte), and receives a flag for each of its names.
    """

    def __init__(self, ranks: "Ranks") -> None:
        self._ranks = ranks
        self._digests: list[str] | None = None
        self.names: list[str] = []
        """Names of the tensors of which this rank writes its piece."""
        self.tensors: dict[str, StoredTensor] = {}
        """Name → chunks of all ranks; empty but on the first rank."""

    def covers(self, digests: Sequence[str]) -> bool:
        """Return whether the plan was made for the pieces of these digests; on the first rank."""
        return self._digests == list(digests)

    def make(self, pieces: Mapping[str, Piece], digests: Sequence[str]) -> None:
        """Make the plan anew; collective.

        Args:
            pieces: this rank's.
            digests: of all ranks' pieces; the first rank's are taken.

        Raises:
            CheckpointError: these pieces make no full state; the same on all ranks.
        """
        self._digests = None
        catalog: list[str] = self._ranks.broadcast(sorted(pieces) if self._ranks.is_first else None)
        found = self._ranks.collect(describe(pieces, catalog))
        answers = None
        if found is not None:
            try:
                division = divide(catalog, [_from_json(each) for each in found])
                answers = [["writes", flags] for flags in division.flags]
                self.tensors = division.tensors
            except CheckpointError as error:
                answers = [["refused", str(error)]] * len(found)
        kind, value = self._ranks.scatter(answers)
        if kind == "refused":
            raise CheckpointError(value)
        self.names = chosen(ordered_names(pieces, catalog), value)
        self._digests = list(digests)


def digest_of(pieces: Mapping[str, Piece]) -> str:
    """Return the SHA-256 of pieces."""
    return hashlib.sha256(json.dumps(pieces, sort_keys=True).encode()).hexdigest()


def _from_json(description: Sequence[object]) -> Description:
    kinds, places, extra = description
    return Description([Piece(*kind) for kind in kinds], places, extra)  # pyrefly: ignore[not-iterable, bad-argument-type]
