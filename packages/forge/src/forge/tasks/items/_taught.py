"""Token stores with a teacher's tokens → micro-batches of a student and of its teacher."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

import forge_data
import forge_packing
from forge._counted import counted, counted_are
from forge.tasks.items._items import Ints
from forge.tasks.items._samples import shortest_samples

_IGNORED = -100
"""Label of the teacher's tokens, none of which is learned."""


class TaughtBatch(NamedTuple):
    """A micro-batch as `forge_algos.AlignedDistill` takes it."""

    row: forge_packing.PackedBatch
    teacher: forge_packing.PackedBatch
    spans: Ints
    """int64[G, 4]: tokens [a, b) of the row and [c, d) of the teacher's."""


class TaughtRows:
    """Each row of a store with a teacher's tokens as one item, without samples of no span.

    A row is several samples where its turns were tokenized one by one; they are trained on in one step.
    """

    shorter = "max_seq_len to drop longer rows"

    def __init__(self, store: forge_data.TokenStore) -> None:
        self.store = store = store.select(np.flatnonzero(store.span_counts))
        ends = store.conversations
        self._ends: Ints = np.arange(len(store) + 1) if ends is None else ends
        begins, texts = self._ends[:-1], store.teacher_texts
        add = np.add.reduceat
        # Each is computed twice: as the student reads it and as the teacher does. Rows are packed by the longer.
        self.lengths: Ints = np.maximum(add(store.lengths, begins), add(store.teacher_lengths, begins))
        self.longest: Ints = np.maximum.reduceat(np.maximum(store.lengths, texts[:, 1]), begins)
        lines = np.maximum(np.diff(self._ends), add(texts[:, 0], begins))
        self.lines: Ints | None = None if (lines == 1).all() else lines
        self.loss_counts: Ints = add(store.span_counts, begins)
        self.weights = store.weights
        self.sources = None if store.weights is None else store.sources[begins]

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __str__(self) -> str:
        return f"{counted(len(self), 'rows')}, in which {counted_are(int(self.loss_counts.sum()), 'spans')} learned"

    def source(self, index: int) -> str:
        """Return the file and row of an item."""
        return self.store.source(int(self._ends[index]))

    def size(self, index: int) -> str:
        """Return the length of a row in words, the student's or the teacher's."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens, of the model or of its teacher"

    def batch(self, indices: Sequence[int] | Ints) -> TaughtBatch:
        """Pack samples into a row of the student's, and their texts into one of the teacher's."""
        samples, texts, spans = [], [], [np.zeros((0, 4), np.int64)]
        begins = np.zeros(2, np.int64)
        for at in (at for index in map(int, indices) for at in range(self._ends[index], self._ends[index + 1])):
            sample = self.store[at]
            theirs, found = self.store.taught(at)
            samples.append(sample)
            texts += [(each, np.full(len(each), _IGNORED, np.int32)) for each in theirs]
            spans.append(found + np.repeat(begins, 2))
            begins += len(sample), sum(map(len, theirs))
        return TaughtBatch(forge_packing.collate(samples), forge_packing.collate(texts), np.concatenate(spans))

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short samples."""
        return shortest_samples(self.store)
