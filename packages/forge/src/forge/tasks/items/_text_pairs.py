"""Stores of queries and documents, or of labelled texts → samples of an embedding model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import attrs
import numpy as np

import forge_algos
import forge_data
from forge._counted import counted
from forge.tasks.items._items import Ints
from forge.tasks.items._labelled import Labelled, WholeTexts, given_labels
from forge.tasks.items._media import media_in_words

_CANDIDATES, _COMPARED = 64, 4


class TextPairs(WholeTexts):
    """Queries, each with its document and any hard negatives.

    Args:
        store: as `forge_data.prepare_text_pairs` makes it.

    """

    shorter = "max_seq_len to drop rows with longer texts"

    def __init__(self, store: forge_data.PromptStore) -> None:
        self.store = store
        self.lengths = store.lengths
        self.weights = store.weights
        self.sources = None if store.weights is None else store.sources
        self.loss_counts = np.ones(len(store), dtype=np.int64)
        self._texts: list[list[int]] = [store.columns(index)["lengths"] for index in range(len(store))]
        self.longest: Ints = np.array([max(row) for row in self._texts], dtype=np.int64)
        self.lines: Ints | None = np.array([len(row) for row in self._texts], dtype=np.int64)
        # Until the model is asked, as if it took them in lines, which have more places than a packed row.
        self.media_rows = "lines" if store.has_media else "packed"

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        negatives = self.hard_negatives
        return (
            f"{len(self):,} queries, each with its document"
            + (f", and {counted(negatives, 'hard negatives')}" if negatives else "")
            + media_in_words(self.store, self.media_counts)
        )

    @property
    def hard_negatives(self) -> int:
        """Number of texts that are neither a query nor its document."""
        return sum(map(len, self._texts)) - 2 * len(self)

    def source(self, index: int) -> str:
        """Return the file and row of a query."""
        return self.store.source(index)

    def size(self, index: int) -> str:
        """Return the length of a row in words."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens in {len(self._texts[index])} texts"

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack queries and their documents into one row, a `forge_algos.ContrastiveBatch`."""
        documents: list[Text] = []
        places: list[str] = []
        queries: list[int] = []
        for index in map(int, indices):
            queries.append(len(documents))
            documents += texts_of(self.store[index])
            places += [self.source(index)] * (len(documents) - len(places))
        first = np.array(queries, dtype=np.int64)
        return forge_algos.ContrastiveBatch(
            row=self.row(documents, places),
            queries=first,
            positives=first + 1,
            media=[text.digest for text in documents] if self.store.has_media else None,
        )

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short queries, to compare two models on."""
        rows = sorted(range(min(len(self), _CANDIDATES)), key=lambda row: self._texts[row][0])
        return [(ids, ids) for row in rows[:_COMPARED] for ids in [self.store[row].input_ids[: self._texts[row][0]]]]


class TextsOfLabels(Labelled):
    """Texts with one label each, of which triplets are made."""

    def __init__(self, store: forge_data.PromptStore) -> None:
        given = given_labels(store)
        if given.several:
            raise forge_data.DataError(
                f"{store.source(0)} has labels, and loss=batch_all_triplet takes one label a text: give label"
            )
        super().__init__(store, given.names, multi_label=False)

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack texts into one row, a `forge_algos.LabelledTexts`."""
        found = super().batch(indices)
        return forge_algos.LabelledTexts(row=found.row, labels=found.targets)


class Text(NamedTuple):
    """A query, or one of its documents."""

    input_ids: Any
    media: tuple[forge_data.Media, ...]

    @property
    def digest(self) -> bytes:
        """What tells its images from other ones for which the same tokens stand; empty without any."""
        return b"".join(bytes.fromhex(medium.sha256) for medium in self.media)


def texts_of(prompt: forge_data.Prompt) -> list[Text]:
    """Return each text of a row, with its own images."""
    ends = [0, *itertools.accumulate(prompt.columns["lengths"])]
    return [
        Text(
            prompt.input_ids[begin:end],
            tuple(
                attrs.evolve(medium, start=medium.start - begin, stop=medium.stop - begin)
                for medium in prompt.media
                if begin <= medium.start < end
            ),
        )
        for begin, end in itertools.pairwise(ends)
    ]
