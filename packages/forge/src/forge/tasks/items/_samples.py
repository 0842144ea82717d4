"""Token stores → single samples, or conversations whose turns are samples."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import forge_data
import forge_packing
from forge._counted import counted
from forge.tasks.items._items import Ints

_CANDIDATES = 64


def shortest_samples(store: Any, most: int = 4) -> list[tuple[Any, Any]]:
    """Return (input_ids, labels) of the shortest of a store's first samples that have a loss."""
    rows = sorted(range(min(len(store), _CANDIDATES)), key=lambda row: int(store.lengths[row]))
    return [(store[row].input_ids, store[row].labels) for row in rows if store.loss_counts[row]][:most]


class Samples:
    """Each sample of a token store as one item."""

    shorter = "max_seq_len to drop longer rows"
    lines: Ints | None = None

    def __init__(self, store: forge_data.TokenStore) -> None:
        self.store = store
        self.share_prefix = False
        self.lengths = self.longest = store.lengths
        self.loss_counts = store.loss_counts
        self.weights = store.weights
        self.sources = None if store.weights is None else store.sources

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        return f"{counted(len(self), 'rows')}, in which {int(self.loss_counts.sum()):,} tokens are learned"

    def source(self, index: int) -> str:
        """Return the file and row of a sample."""
        return self.store.source(index)

    def size(self, index: int) -> str:
        """Return the length of a sample in words."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens"

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack samples into one row."""
        samples = [self.store[int(i)] for i in indices]
        return forge_packing.collate_shared(samples) if self.share_prefix else forge_packing.collate(samples)

    def sharing(self, *, share_prefix: bool, share_history: bool = False) -> Self:  # noqa: ARG002 - of conversations
        """Return the same items, with shared or repeated prefixes."""
        same = copy(self)
        same.share_prefix = share_prefix
        return same

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short samples."""
        return shortest_samples(self.store)


class Conversations(Samples):
    """Rows of a token store, of which some were tokenized once for each learned turn.

    The turns of a row are trained on in one step, and their common history may be computed once for all of them.
    """

    shorter = "max_seq_len to leave out longer turns"

    def __init__(self, store: forge_data.TokenStore) -> None:
        # Deferred, as the command line's help needs none of it.
        import numpy as np

        super().__init__(store)
        self.share_history = False
        assert store.conversations is not None
        self._ends = store.conversations
        begins = self._ends[:-1]
        # Planned as if histories were shared, so that steps do not depend on what the attention can do.
        self.lengths = np.add.reduceat(store.lengths - store.shared, begins)
        self.longest = np.maximum.reduceat(store.lengths, begins)
        self.unshared = np.add.reduceat(store.lengths, begins)
        """int64[N]: tokens of each row where every turn repeats its history."""
        self.lines = np.diff(self._ends)
        self.loss_counts = np.add.reduceat(store.loss_counts, begins)
        self.sources = None if store.weights is None else store.sources[begins]

    def sharing(self, *, share_prefix: bool, share_history: bool = False) -> Self:
        """Return the same items, with shared or repeated histories, and prefixes of several rows."""
        same = super().sharing(share_prefix=share_prefix)
        same.share_history = share_history
        return same

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __str__(self) -> str:
        turns = (
            f"{counted(len(self.store), 'samples')}, one for each learned turn where turns are asked for in another form than "
            "history"
        )
        return f"{counted(len(self), 'rows')} as {turns}; {int(self.loss_counts.sum()):,} tokens are learned"

    def source(self, index: int) -> str:
        """Return the file and row of a conversation."""
        return self.store.source(int(self._ends[index]))

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack conversations into one row."""
        turns = [[self.store[at] for at in range(self._ends[i], self._ends[i + 1])] for i in map(int, indices)]
        return forge_packing.collate_turns(turns, share_history=self.share_history, share_prefix=self.share_prefix)


def items_of(store: forge_data.TokenStore) -> Samples:
    """Return the samples of a store, by conversation where their turns were tokenized apart."""
    return Samples(store) if store.conversations is None else Conversations(store)
