"""Stores of labelled texts → samples of a sequence classifier."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any, NamedTuple, Self

import numpy as np

import forge_algos
import forge_data
import forge_packing
from forge._counted import counted
from forge.tasks.items._items import Ints
from forge.tasks.items._media import MediaRows, media_in_words, media_row

_IGNORE = -100
_CANDIDATES, _COMPARED = 64, 4


class Given(NamedTuple):
    """Labels of a store's rows, as the rows give them."""

    rows: list[list[str | int]]
    """Of each row: one label, or several."""
    several: bool
    """Whether a row holds a list of `labels`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all labels, sorted: whole numbers by size."""
        found = {label for row in self.rows for label in row}
        if all(isinstance(label, int) for label in found):
            return tuple(map(str, sorted(found)))
        return tuple(sorted({str(label) for label in found}))


def given_labels(store: forge_data.PromptStore) -> Given:
    """Read the labels of a store's rows.

    Raises:
        forge_data.DataError: some rows have `label` and others `labels`, or rows have neither.
    """
    columns = [store.columns(index) for index in range(len(store))]
    several = "labels" in columns[0]
    wanted, other = ("labels", "label") if several else ("label", "labels")
    for index, row in enumerate(columns):
        if wanted not in row:
            raise forge_data.DataError(
                f"{store.source(index)} has {other if other in row else 'no label'}, and {store.source(0)} has {wanted}; give "
                "every row label (one of several), or every row labels (any number of them)"
            )
    return Given([row["labels"] if several else [row["label"]] for row in columns], several)


class WholeTexts:
    """Texts that are read whole, of which nothing is learned token by token."""

    store: forge_data.PromptStore
    media_rows: MediaRows = "packed"
    _media: forge_data.MediaInputs | None = None

    @property
    def media_counts(self) -> Ints:
        """int64[N, 2]: images of each item, and tokens that stand for those."""
        return self.store.media_counts

    def with_media(self, inputs: forge_data.MediaInputs, rows: MediaRows) -> Self:
        """Return the same texts, whose rows are given their images."""
        same = copy(self)
        same._media, same.media_rows = inputs, rows
        return same

    def row(self, texts: Sequence[Any], places: Sequence[str]) -> Any:
        """Pack texts into one row, with their images where one has some; `places` are for errors."""
        row = forge_packing.collate([Unlearned.of(text.input_ids) for text in texts])
        return row if self._media is None else media_row(row, texts, places, self._media)


class Labelled(WholeTexts):
    """Texts with one class each, or with any number of labels.

    Args:
        store: of labelled texts.
        names: of the labels, in the order of the model's outputs.
        multi_label: whether a row may have several labels, or none.

    Raises:
        forge_data.DataError: a row's label is none of the names, or it has not exactly one where it must.
    """

    shorter = "max_seq_len to drop longer texts"
    lines: Ints | None = None

    def __init__(self, store: forge_data.PromptStore, names: Sequence[str], *, multi_label: bool) -> None:
        self.store = store
        self.lengths = self.longest = store.lengths
        self.weights = store.weights
        self.sources = None if store.weights is None else store.sources
        self.loss_counts = np.ones(len(store), dtype=np.int64)
        self._names, known = tuple(names), {name: number for number, name in enumerate(names)}
        numbered = any(name.lstrip("-").isdigit() for name in names)
        given = given_labels(store)
        self.targets: Any = np.zeros((len(store), len(names)), np.float32) if multi_label else np.zeros(len(store), np.int64)
        """int64[N], the class of each text; or float32[N, C], which of C labels it has."""
        for index, row in enumerate(given.rows):
            if not multi_label and len(row) != 1:
                raise forge_data.DataError(
                    f"{store.source(index)}: has {len(row)} labels, and problem_type=single_label_classification takes one a "
                    "row; leave problem_type out, or give each row one"
                )
            for label in row:
                number = known.get(str(label))
                if number is None and isinstance(label, int) and not numbered and 0 <= label < len(names):
                    number = label
                if number is None:
                    raise self._unknown(index, label)
                if multi_label:
                    self.targets[index, number] = 1
                else:
                    self.targets[index] = number

    def __len__(self) -> int:
        return len(self.store)

    def __str__(self) -> str:
        media = media_in_words(self.store, self.media_counts)
        return f"{counted(len(self), 'texts')} with the labels {', '.join(self._names)}{media}"

    def source(self, index: int) -> str:
        """Return the file and row of a text."""
        return self.store.source(index)

    def size(self, index: int) -> str:
        """Return the length of a text in words."""
        return f"{self.source(index)} has {self.lengths[index]:,} tokens"

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """Pack texts into one row, a `forge_algos.ClassifyBatch`."""
        at = np.asarray(indices, dtype=np.int64)
        texts, places = [self.store[int(index)] for index in at], [self.source(int(index)) for index in at]
        return forge_algos.ClassifyBatch(row=self.row(texts, places), targets=self.targets[at])

    def short_samples(self) -> list[tuple[Any, Any]]:
        """Return a few short texts, to compare two models on."""
        rows = sorted(range(min(len(self), _CANDIDATES)), key=lambda row: int(self.lengths[row]))
        return [(ids, ids) for row in rows[:_COMPARED] for ids in [self.store[row].input_ids]]

    def used(self) -> set[int]:
        """Return the numbers of the labels that a text has."""
        return set(np.flatnonzero(self.targets.any(0)).tolist() if self.targets.ndim > 1 else self.targets.tolist())

    def _unknown(self, index: int, label: str | int) -> forge_data.DataError:
        shown = ", ".join(self._names[:10]) + (f" and {len(self._names) - 10} more" if len(self._names) > 10 else "")
        return forge_data.DataError(
            f"{self.source(index)}: the label {label!r} is none of the labels, which are {shown}; correct the row, or name it "
            "in `labels` (of a model that is a classifier already: one name for each of its outputs, in their order)"
        )


class Unlearned(NamedTuple):
    """Tokens of a text, none of which is learned."""

    input_ids: Any
    labels: Any
    weights: Any = None

    @classmethod
    def of(cls, ids: Any) -> Unlearned:
        """Return a text by its tokens."""
        return cls(ids, np.full(len(ids), _IGNORE, np.int32))
