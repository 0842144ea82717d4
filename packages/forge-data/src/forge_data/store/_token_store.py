"""Prepared samples on disk, memory-mapped: read by index at no cost, whole or as a view of some of them."""

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forge_data._errors import StoreError
from forge_data._example import TokenizedExample
from forge_data.store._base import Stored
from forge_data.store._manifest import LINT, MARGINS, PREFERENCE, UNPAIRED
from forge_data.store._split import pairs_of
from forge_data.store._stored_example import stored_example
from forge_data.store._token_store_from_loss_counts import loss_counts

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from transformers import PreTrainedTokenizerBase

    from forge_data.findings._report import LintReport

_PASS = 4096
"""Samples after which a pass over all of them gives back the memory that they were read into."""


class TokenStore(Stored):
    """N samples on disk; `store[i]` is a `TokenizedExample`, `len(store)` is N.

    Open one with `TokenStore.open(directory)`. `select` and `split` give views: the same files, other samples.
    """

    _of_prompts = False

    @classmethod
    def from_jsonl(
        cls,
        file: str | os.PathLike[str],
        directory: str | os.PathLike[str],
        *,
        tokenizer: "PreTrainedTokenizerBase | str | os.PathLike[str] | None" = None,
    ) -> "TokenStore":
        """The store of a file of `{"input_ids": [...], "labels": [...], "len": n}`, mini-trainer's form, in a directory.

        A tokenizer is not needed; with one, ids are held against its vocabulary and the viewer can show text.

        Raises:
            DataError: the file, or a row of it by `file:row`.
            StoreError: the directory holds something else, or cannot be written.
        """
        from forge_data.store._jsonl import read_jsonl

        return read_jsonl(file, directory, tokenizer)

    def to_jsonl(self, file: str | os.PathLike[str]) -> Path:
        """Every sample as a line `{"input_ids": [...], "labels": [...], "len": n}`; the file is there when it is whole.

        Raises:
            StoreError: the file cannot be written.
        """
        from forge_data.store._jsonl import write_jsonl

        return write_jsonl(self, file)

    def __getitem__(self, index: int) -> TokenizedExample:
        if type(index) is int and 0 <= index < self._count:
            at = index if self._bases is None else self._bases[index]
        else:
            at = self._base(index)
        bounds = self._bounds
        return stored_example(self._arrays, at, self._ids[bounds[at] : bounds[at + 1]])

    def __iter__(self) -> Iterator[TokenizedExample]:
        for index in range(len(self)):
            yield self[index]
            if not (index + 1) % _PASS:
                self._files.release()

    def __repr__(self) -> str:
        kind = "" if self.kind == "supervised" else f", kind={self.kind!r}"
        return f"TokenStore({str(self.path)!r}, samples={len(self)}, tokens={int(self.lengths.sum())}{kind})"

    @cached_property
    def loss_counts(self) -> "NDArray[np.int64]":
        """int64[N], how many of each sample's tokens count in the loss: those of `labels[1:]` that are not -100."""
        return self._pick(loss_counts(self._files))

    @cached_property
    def pairs(self) -> "NDArray[np.int64]":
        """int64[P, 2], the samples (chosen, rejected) of each preference.

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
        """float32[P], by how much the chosen answer of each of `pairs` is better, as its row says; None where no row does.

        Raises:
            StoreError: this view holds only one side of a preference.
        """
        if MARGINS not in self._arrays:
            return None
        margins = self._arrays[MARGINS]
        return margins.copy() if self._indices is None else margins[self._indices[self.pairs[:, 0]] // 2]

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
    def lint(self) -> "LintReport":
        """What the lint found while the store was prepared; a view has its store's."""
        from forge_data.findings._report import LintReport

        return LintReport.loads((self.path / LINT).read_text("utf-8"), str(self.path / LINT))

    def split(self, fraction: float, seed: int | None = None) -> tuple["TokenStore", "TokenStore"]:
        """(train, held out): a share of the samples held out, the same ones for the same seed on every machine.

        What was one preference or one row is held out whole, and so are samples of the same tokens: none of what is
        measured by was trained on. Without a seed, the one that the store was prepared with draws.

        Raises:
            DataError: the share leaves one of the two without a sample.
        """
        from forge_data.store._duplicates import twins_of

        pairs = self.pairs if self.kind == PREFERENCE else None
        parts = self._parted(twins_of(self), fraction, seed, "samples")
        train, held_out = parts if pairs is None else (pairs[part].reshape(-1) for part in parts)
        return self.select(train), self.select(held_out)
