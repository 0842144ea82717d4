"""Token stores → single samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import forge_data
import forge_packing
from forge.tasks.items._items import Ints

_CANDIDATES = 64


def shortest_samples(store: Any, most: int = 4) -> list[tuple[Any, Any]]:
    """Return (input_ids, labels) of the shortest of a store's first samples that have a loss."""
    rows = sorted(range(min(len(store), _CANDIDATES)), key=lambda row: int(store.lengths[row]))
    return [(store[row].input_ids, store[row].labels) for row in rows if store.loss_counts[row]][:most]


class Samples:
    """Each sample of a token store as one item."""

    shorter = "max_seq_len to drop longer rows"

    def __init__(self, store: forge_data.TokenStore) -> None:
        self.store = store
        self.lengths = self.longest = store.lengths
        self.loss_counts = store.loss_counts
        self.weights = store.weights
        self.sources = None if store.weights is None else store.sources

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        return f"{len(self):,} rows, in which {int(self.loss_counts.sum()):,} tokens are learned"

    def source(self, index: int) -> str:
        """Return the file and row of a sample."""
        return self.store.source(index)

    def size(self, index: int) -> str:
        """Return the length of a sample in words."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens"

    def batch(self, indices: Sequence[int] | Ints) -> forge_packing.PackedBatch:
        """Pack samples into one row."""
        return forge_packing.collate([self.store[int(i)] for i in indices])

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short samples."""
        return shortest_samples(self.store)
