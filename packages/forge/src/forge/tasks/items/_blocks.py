"""Stores of documents → what a plan numbers: blocks, each token of which is learned once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import forge_data
import forge_packing
from forge.tasks._task import Ints
from forge.tasks.items._samples import few_of


class DocumentBlocks:
    """Documents cut into blocks, each token of them learned once."""

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
        return f"{len(self):,} blocks of {len(self.store):,} documents, in which {int(self.loss_counts.sum()):,} tokens are learned"

    def source(self, index: int) -> str:
        """Where the block's first document came from."""
        return self.store.source(self._blocks[index][0][0])

    def size(self, index: int) -> str:
        """Say what has how many tokens."""
        return f"the block that begins with {self.source(index)} has {self.lengths[index]:,} tokens"

    shorter = "lower block_size"

    def batch(self, indices: Sequence[int] | Ints) -> forge_packing.PackedBatch:
        """Blocks in one row; where documents do not see each other, each piece of one is a sample."""
        samples = []
        for i in indices:
            pieces = [np.asarray(self.store[document].input_ids[start:stop]) for document, start, stop in self._blocks[int(i)]]
            samples += [np.concatenate(pieces)] if self._blocks.cross_documents else pieces
        return forge_packing.collate([(ids, ids) for ids in samples])

    def few(self) -> list[tuple[Any, Any]]:
        """Some short documents."""
        return few_of(self.store)
