"""Stores of documents → blocks of a fixed size, in which each token is learned once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import forge_data
import forge_packing
from forge._counted import counted, counted_are
from forge.tasks.items._items import Ints
from forge.tasks.items._samples import shortest_samples


class _Piece(NamedTuple):
    """Tokens of a document, every one of them learned."""

    input_ids: Any
    labels: Any
    weights: Any
    """float32[S]; None where each token counts 1."""


def _piece(document: forge_data.TokenizedExample, start: int, stop: int) -> _Piece:
    ids, weights = np.asarray(document.input_ids[start:stop]), document.weights
    return _Piece(ids, ids, None if weights is None else weights[start:stop])


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    ids = np.concatenate([piece.input_ids for piece in pieces])
    if all(piece.weights is None for piece in pieces):
        return _Piece(ids, ids, None)
    ones = (np.ones(len(piece.input_ids), np.float32) if piece.weights is None else piece.weights for piece in pieces)
    return _Piece(ids, ids, np.concatenate(list(ones)))


class DocumentBlocks:
    """Documents cut into blocks."""

    shorter = "lower block_size"

    def __init__(self, store: forge_data.TokenStore, *, block_size: int, cross_documents: bool) -> None:
        self.store = store
        self._blocks = forge_packing.split_documents(store.lengths, block_size, cross_documents=cross_documents)
        self.lengths = self.longest = self._blocks.lengths
        self.lines: Ints | None = None
        if not cross_documents:
            begins, pieces = self._blocks.block_starts, self._blocks.stop - self._blocks.start
            self.longest, self.lines = np.maximum.reduceat(pieces, begins[:-1]), np.diff(begins)
        self.loss_counts = self._blocks.loss_counts
        self.weights: list[float] | None = None
        self.sources: Ints | None = None

    def __len__(self) -> int:
        return len(self._blocks)

    def __str__(self) -> str:
        learned, documents = int(self.loss_counts.sum()), counted(len(self.store), "documents")
        return f"{counted(len(self), 'blocks')} of {documents}, in which {counted_are(learned, 'tokens')} learned"

    def source(self, index: int) -> str:
        """Return the file and row of the block's first document."""
        return self.store.source(self._blocks[index][0][0])

    def size(self, index: int) -> str:
        """Return the length of a block in words."""
        return f"the block that begins with {self.source(index)} has {self.lengths[index]:,} tokens"

    def batch(self, indices: Sequence[int] | Ints) -> forge_packing.PackedBatch:
        """Pack blocks into one row; without cross_documents each piece of a document is a sample."""
        samples: list[_Piece] = []
        for i in indices:
            pieces = [_piece(self.store[document], start, stop) for document, start, stop in self._blocks[int(i)]]
            samples += [_joined(pieces)] if self._blocks.cross_documents else pieces
        return forge_packing.collate(samples)

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short documents."""
        return shortest_samples(self.store)
