"""Token stores → what a plan numbers, and how some of it becomes one micro-batch: samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import forge_data
import forge_packing
from forge.tasks._task import Ints

_LOOKED_AT = 64


def few_of(store: Any, most: int = 4) -> list[tuple[Any, Any]]:
    """Pick the shortest few of a token store's first samples that have something to learn."""
    rows = sorted(range(min(len(store), _LOOKED_AT)), key=lambda row: int(store.lengths[row]))
    return [(store[row].input_ids, store[row].labels) for row in rows if store.loss_counts[row]][:most]


class Samples:
    """Each sample of a store by itself."""

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
        """Where the sample came from."""
        return self.store.source(index)

    def size(self, index: int) -> str:
        """Say what has how many tokens."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens"

    shorter = "max_seq_len to drop longer rows"

    def batch(self, indices: Sequence[int] | Ints) -> forge_packing.PackedBatch:
        """Samples one after another in one row."""
        return forge_packing.collate([self.store[int(i)] for i in indices])

    def few(self) -> list[tuple[Any, Any]]:
        """Some short ones."""
        return few_of(self.store)
