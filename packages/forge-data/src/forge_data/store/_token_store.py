"""Prepared samples on disk, memory-mapped and read by index, all of them or a view."""

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Self, overload

import numpy as np

from forge_data._errors import DataError, StoreError
from forge_data._example import TokenizedExample
from forge_data.findings._report import LintReport
from forge_data.store._base import Store
from forge_data.store._jsonl import write_jsonl
from forge_data.store._manifest import (
    ALONE,
    LINT,
    MARGINS,
    PREFERENCE,
    SHARED,
    SPAN_OFFSETS,
    SPANS,
    TEACHER_IDS,
    TEACHER_OFFSETS,
    TEACHER_RUNS,
    TEACHER_STARTS,
    UNPAIRED,
)
from forge_data.store._split import pairs_of
from forge_data.store._stored_example import stored_example
from forge_data.store._table import to_dataset, write_parquet

if TYPE_CHECKING:
    from datasets import Dataset
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from forge_data.store._files import Files

_COUNTED_AT_ONCE = 4096
"""Samples counted at once; all at once would take eight bytes a token, more than all else in preparing."""
_RELEASE_EVERY = 4096
"""Samples after which a pass over all of them gives back the memory that they were read into."""


class TokenStore(Store):
    """N samples on disk; `store[i]` is a `TokenizedExample`, `len(store)` is N.

    Open one with `TokenStore.open(directory)`. `store[10:20]`, `select` and `split` give views: the same files, other samples.
    """

    _of_prompts = False
    _plural = "samples"

    @classmethod
    def from_jsonl(
        cls,
        file: str | os.PathLike[str],
        directory: str | os.PathLike[str],
        *,
        tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str] | None" = None,
    ) -> "TokenStore":
        """Make a store of a file of `{"input_ids": [...], "labels": [...], "len": n}` lines.

        The form is mini-trainer's. A tokenizer is not needed; with one, ids are compared with its vocabulary and the viewer can
        show text.

        Raises:
            DataError: the file, or a row of it by `file:row`.
            StoreError: the directory holds something else, or cannot be written.
        """
        from forge_data.preparing._from_jsonl import read_jsonl

        return read_jsonl(file, directory, tokenizer)

    def to_jsonl(self, file: str | os.PathLike[str]) -> Path:
        """Write every sample as a line `{"input_ids": [...], "labels": [...], "len": n}`.

        The file is there when it is complete.

        Raises:
            StoreError: the file cannot be written, or samples have images, which such lines do not hold.
        """
        self._refuse_media()
        return write_jsonl(self, self.path, file)

    def to_dataset(self) -> "Dataset":
        """Make a `datasets.Dataset`: `input_ids`, `labels`, and `weights` where rows have some.

        TRL and a `DataLoader` take it as it is; TRL reads no weights. Unpaired answers have `desirable` too. A preference is
        one row: `chosen_input_ids`, `chosen_labels`, `rejected_input_ids`, `rejected_labels`, and `margin` where the rows gave
        it. It is held in memory, 8 bytes a token; for more there is `to_parquet`, which `datasets.load_dataset("parquet",
        data_files=...)` maps from disk.
        """
        self._refuse_media()
        return to_dataset(self)

    def to_parquet(self, file: str | os.PathLike[str]) -> Path:
        """Write the rows of `to_dataset` as a Parquet file, in bounded memory.

        Raises:
            StoreError: the file cannot be written.
        """
        self._refuse_media()
        return write_parquet(self, file)

    @overload
    def __getitem__(self, index: int) -> TokenizedExample: ...
    @overload
    def __getitem__(self, index: slice) -> Self: ...
    def __getitem__(self, index: int | slice) -> TokenizedExample | Self:
        if type(index) is int and 0 <= index < self._count:
            at = index if self._view is None else self._view[index]
        elif isinstance(index, slice):
            return self._slice(index)
        else:
            at = self._stored_index(index)
        bounds = self._bounds
        return stored_example(self._arrays, at, self._ids[bounds[at] : bounds[at + 1]])

    def __iter__(self) -> Iterator[TokenizedExample]:
        for index in range(len(self)):
            yield self[index]
            if not (index + 1) % _RELEASE_EVERY:
                self._files.release()

    def __repr__(self) -> str:
        kind = "" if self.kind == "supervised" else f", kind={self.kind!r}"
        return f"TokenStore({str(self.path)!r}, samples={len(self)}, tokens={int(self.lengths.sum())}{kind})"

    @property
    def flat(self) -> "tuple[NDArray[np.int32], NDArray[np.int64]]":
        """(int32[T], int64[N]): the ids of all samples of the files, and where each of these begins.

        For work on many samples at once; the ids are mapped from the file, and sample i has `lengths[i]` of them.
        """
        return self._ids, self._pick(self._arrays["offsets.bin"][:-1])

    @cached_property
    def loss_counts(self) -> "NDArray[np.int64]":
        """int64[N], tokens of each sample that count in the loss: labels but the first, not -100."""
        return self._pick(loss_counts(self._files))

    @cached_property
    def prompt_lengths(self) -> "NDArray[np.int64]":
        """int64[N], tokens of each sample before the first that is learned: all, where none is."""
        return self._pick(prompt_lengths(self._files))

    @cached_property
    def pairs(self) -> "NDArray[np.int64]":
        """int64[P, 2], samples (chosen, rejected) of each preference.

        Raises:
            StoreError: the store holds no preferences, or this view only one side of one.
        """
        if self.kind != PREFERENCE:
            raise StoreError(
                f"{self.path} holds {self.kind} samples, so it has no pairs; they come of rows with chosen and rejected"
            )
        if self._indices is None:
            return np.arange(len(self), dtype=np.int64).reshape(-1, 2)
        return pairs_of(self._indices)

    @cached_property
    def margins(self) -> "NDArray[np.float32] | None":
        """float32[P], by how much the chosen answer of each pair is better; None if no row gives it.

        Raises:
            StoreError: this view holds only one side of a preference.
        """
        if MARGINS not in self._arrays:
            return None
        margins = self._arrays[MARGINS]
        return margins.copy() if self._indices is None else margins[self._indices[self.pairs[:, 0]] // 2]

    @cached_property
    def conversations(self) -> "NDArray[np.int64] | None":
        """int64[C+1], the first sample of each row, and N at the end.

        A row may be several samples, one for each of its learned turns. None where no row became several such samples.
        """
        if SHARED not in self._arrays:
            return None
        at = np.arange(len(self)) if self._indices is None else self._indices
        ends = self._arrays[SHARED][at] == ALONE
        # A view may leave out the last turn of a row.
        ends[:-1] |= np.diff(at) != 1
        ends[-1:] = True
        return np.append(0, np.flatnonzero(ends) + 1).astype(np.int64)

    @cached_property
    def shared(self) -> "NDArray[np.int64]":
        """int64[N], first tokens of each sample that the sample of a later turn of its row has too."""
        if SHARED not in self._arrays:
            return np.zeros(len(self), dtype=np.int64)
        return np.maximum(self._pick(self._arrays[SHARED]), 0)

    @property
    def has_teacher(self) -> bool:
        """Whether a teacher's tokens are beside the samples, as `prepare_taught` puts them there."""
        return SPANS in self._arrays

    @cached_property
    def span_counts(self) -> "NDArray[np.int64]":
        """int64[N], spans of each sample that its teacher's tokens cut alike; 0 without a teacher."""
        return self._pick(np.diff(self._arrays[SPAN_OFFSETS]) // 4) if self.has_teacher else np.zeros(len(self), np.int64)

    @cached_property
    def teacher_lengths(self) -> "NDArray[np.int64]":
        """int64[N], tokens that the teacher has of each sample's text; 0 without a teacher."""
        return self._pick(np.diff(self._arrays[TEACHER_OFFSETS])) if self.has_teacher else np.zeros(len(self), np.int64)

    @cached_property
    def teacher_texts(self) -> "NDArray[np.int64]":
        """int64[N, 2], the teacher's texts of each sample, and tokens of the longest of these."""
        if not self.has_teacher:
            return np.zeros((len(self), 2), np.int64)
        offsets, begins = self._arrays[TEACHER_OFFSETS], np.flatnonzero(self._arrays[TEACHER_STARTS])
        of = np.searchsorted(offsets, begins, side="right") - 1
        longest = np.zeros(len(offsets) - 1, np.int64)
        np.maximum.at(longest, of, np.diff(np.append(begins, offsets[-1])))
        return np.stack([self._pick(np.bincount(of, minlength=len(longest))), self._pick(longest)], axis=1)

    @property
    def teacher_runs(self) -> "NDArray[np.int64]":
        """int64[N], where in a teacher's tokens of each sample its last learned stretch begins.

        Raises:
            StoreError: the store was prepared without a teacher, or by an earlier version.
        """
        if TEACHER_RUNS not in self._arrays:
            raise StoreError(f"{self.path} does not say where a teacher's answers begin; prepare_taught writes that")
        return self._pick(self._arrays[TEACHER_RUNS]).astype(np.int64)

    @property
    def teacher_ends(self) -> list[tuple[int, int]]:
        """Pairs of a token that ends a turn and of the teacher's that does; none without a teacher."""
        return [(int(own), int(theirs)) for own, theirs in self.settings.get("teacher_ends", ())]

    def taught(self, index: int) -> "tuple[list[NDArray[np.int32]], NDArray[np.int32]]":
        """Return a sample as the teacher has it: its texts int32[U] each, and spans int32[G, 4].

        A span is tokens [a, b) of the sample and [c, d) of the texts one after another, which spell the same.

        Raises:
            StoreError: the store was prepared without a teacher.
        """
        if not self.has_teacher:
            raise StoreError(f"{self.path} has no teacher's tokens; prepare_taught makes a store with them")
        at, arrays = self._stored_index(index), self._arrays
        begin, end = arrays[TEACHER_OFFSETS][at : at + 2]
        first, last = arrays[SPAN_OFFSETS][at : at + 2]
        texts = np.split(arrays[TEACHER_IDS][begin:end], np.flatnonzero(arrays[TEACHER_STARTS][begin:end])[1:])
        return [each for each in texts if len(each)], arrays[SPANS][first:last].reshape(-1, 4)

    @cached_property
    def desirable(self) -> "NDArray[np.bool_]":
        """bool[N], whether each answer is wanted.

        Raises:
            StoreError: the store holds no unpaired preferences.
        """
        if self.kind != UNPAIRED:
            raise StoreError(
                f"{self.path} holds {self.kind} samples; which are desirable is known of unpaired preferences only"
            )
        return self._pick(self._arrays["desirable.bin"]).astype(np.bool_)

    @cached_property
    def lint(self) -> LintReport:
        """Findings of the lint while the store was prepared; a view has its store's."""
        return LintReport.loads((self.path / LINT).read_text("utf-8"), str(self.path / LINT))

    def _refuse_media(self) -> None:
        if self.has_media:
            raise StoreError(
                f"{self.path} has samples with images, which rows of token ids do not hold; take the store itself, or select "
                "samples without images"
            )

    def _unit_samples(self) -> "NDArray[np.int64]":
        return self.pairs if self.kind == PREFERENCE else super()._unit_samples()


def loss_counts(files: "Files") -> "NDArray[np.int64]":
    """Count the learned tokens of each sample but its first token: int64[N]."""
    mask, offsets = files.arrays["loss_mask.bin"], files.arrays["offsets.bin"]
    counts = np.empty(len(offsets) - 1, dtype=np.int64)
    for first in range(0, len(counts), _COUNTED_AT_ONCE):
        bounds = offsets[first : first + _COUNTED_AT_ONCE + 1]
        here = mask[bounds[0] : bounds[-1]]
        starts = bounds[:-1] - bounds[0]
        counts[first : first + _COUNTED_AT_ONCE] = np.add.reduceat(here, starts, dtype=np.int64) - here[starts]
        files.release()
    return counts


def prompt_lengths(files: "Files") -> "NDArray[np.int64]":
    """Count the tokens of each sample before the first that is learned: int64[N]."""
    mask, offsets = files.arrays["loss_mask.bin"], files.arrays["offsets.bin"]
    found = np.empty(len(offsets) - 1, dtype=np.int64)
    for first in range(0, len(found), _COUNTED_AT_ONCE):
        bounds = offsets[first : first + _COUNTED_AT_ONCE + 1]
        learned = np.append(np.flatnonzero(mask[bounds[0] : bounds[-1]]) + bounds[0], bounds[-1])
        next_learned = learned[np.searchsorted(learned, bounds[:-1])]
        found[first : first + _COUNTED_AT_ONCE] = np.minimum(next_learned, bounds[1:]) - bounds[:-1]
        files.release()
    return found


def check_classes(store: TokenStore) -> None:
    """Make sure that unpaired preferences hold both wanted and unwanted answers.

    KTO (Ethayarajh and others 2024, equation 8) learns from the difference; of one class alone it pushes every answer one way.

    Raises:
        DataError: all labels are the same.
        StoreError: the store holds no unpaired preferences.
    """
    wanted = store.desirable
    if wanted.any() and not wanted.all():
        return
    if not len(wanted):
        raise DataError(f"{store.path}: this view holds no answer; KTO needs wanted and unwanted ones")
    label = "true" if wanted[0] else "false"
    remedy = (
        "add rows with label false, or learn these with sft"
        if wanted[0]
        else "add rows with label true: nothing here is to be learned"
    )
    raise DataError(
        f"{store.source(0)} and every other answer that is trained on ({len(wanted):,}) has the label {label}, and KTO learns "
        f"from the difference between wanted and unwanted answers; {remedy}"
    )
