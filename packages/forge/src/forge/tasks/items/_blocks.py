"""Stores of documents → blocks of a fixed size, in which each token is learned once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import forge_data
import forge_packing
from forge.tasks.items._items import Ints
from forge.tasks.items._samples import shortest_samples


class DocumentBlocks:
    """Documents cut into blocks."""

    shorter = "lower block_size"

    def __init__(self, store: forge_data.TokenStore, *, block_size: int, cross_documents: bool) -> None:
        self.store = store
        self._blocks = forge_packing.split_documents(store.lengths, block_size, cross_documents=cross_documents)
        self.lengths = self.longest = self._blocks.lengths
        self.loss_counts = self._blocks.loss_counts
        self.weights: list[float] | None = None
        self.sources: Ints | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __str__(self) -> str:
        learned = int(self.loss_counts.sum())
        return f"{len(self):,} blocks of {len(self.store):,} documents, in which {learned:,} tokens are learned"

    def source(self, index: int) -> str:
        """Return the file and row of the block's first document."""
        return self.store.source(self._blocks[index][0][0])

    def size(self, index: int) -> str:
        """Return the length of a block in words."""
        return f"the block that begins with {self.source(index)} has {self.lengths[index]:,} tokens"

    def batch(self, indices: Sequence[int] | Ints) -> forge_packing.PackedBatch:
        """Pack blocks into one row; without cross_documents each piece of a document is a sample."""
        samples = []
        for i in indices:
            pieces = [np.asarray(self.store[document].input_ids[start:stop]) for document, start, stop in self._blocks[int(i)]]
            samples += [np.concatenate(pieces)] if self._blocks.cross_documents else pieces
        return forge_packing.collate([(ids, ids) for ids in samples])

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short documents."""
        return shortest_samples(self.store)
