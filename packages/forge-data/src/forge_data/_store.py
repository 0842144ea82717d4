"""Prepared samples on disk, memory-mapped: read by index at no cost, whole or as a view of some of them."""

import hashlib
import operator
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._accounting import Accounting
from forge_data._dropped import dropped_rows
from forge_data._errors import DataError, StoreError
from forge_data._example import TokenizedExample
from forge_data._home import at_home
from forge_data._loss_counts import loss_counts
from forge_data._manifest import LINT, PREFERENCE, TOKENIZER, UNPAIRED, Manifest, read_manifest
from forge_data._open import Files, undisturbed, verify
from forge_data._record import place_of
from forge_data._split import pairs_of, split_indices
from forge_data._stored_example import stored_example

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from transformers import PreTrainedTokenizerBase

    from forge_data._findings import LintReport

_PASS = 4096
"""Samples after which a pass over all of them gives back the memory that they were read into."""


class TokenStore:
    """N samples on disk; `store[i]` is a `TokenizedExample`, `len(store)` is N.

    Open one with `TokenStore.open(directory)`. `select` and `split` give views: the same files, other samples.
    """

    def __init__(self, path: Path, manifest: Manifest, indices: "NDArray[np.int64] | None" = None) -> None:
        self.path = path
        """The directory."""
        self._manifest = manifest
        self._indices = indices
        self._files = Files(path, manifest)
        self._arrays = self._files.arrays
        self._ids = self._arrays["input_ids.bin"]
        # A memoryview gives Python's integers several times quicker than an array does.
        self._bounds = self._arrays["offsets.bin"].data
        self._bases = None if indices is None else indices.data
        self._count = manifest.samples if indices is None else len(indices)

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "TokenStore":
        """The store in a directory. Sizes and format are checked; `verify()` checks every byte.

        Raises:
            StoreError: no store, a torn one, or one of another format.
        """
        path = at_home(directory, StoreError)
        return undisturbed(path, lambda: cls(path, read_manifest(path)))

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
        from forge_data._jsonl import read_jsonl

        return read_jsonl(file, directory, tokenizer)

    def to_jsonl(self, file: str | os.PathLike[str]) -> Path:
        """Every sample as a line `{"input_ids": [...], "labels": [...], "len": n}`; the file is there when it is whole.

        Raises:
            StoreError: the file cannot be written.
        """
        from forge_data._jsonl import write_jsonl

        return write_jsonl(self, file)

    def __len__(self) -> int:
        return self._count

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

    def __reduce__(self) -> tuple[Callable[..., "TokenStore"], tuple[Any, ...]]:
        # Another process maps the files itself; a pickled map would carry all the tokens along.
        return _reopen, (self.path, self._manifest.fingerprint, self._indices)

    @cached_property
    def lengths(self) -> "NDArray[np.int64]":
        """int64[N], tokens of each sample."""
        return self._pick(np.diff(self._arrays["offsets.bin"]))

    @cached_property
    def loss_counts(self) -> "NDArray[np.int64]":
        """int64[N], how many of each sample's tokens count in the loss: those of `labels[1:]` that are not -100."""
        return self._pick(loss_counts(self._files))

    @property
    def kind(self) -> str:
        """`supervised`, `preference` (two samples a row, see `pairs`) or `unpaired_preference` (see `desirable`)."""
        return self._manifest.kind

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
    def sources(self) -> "NDArray[np.int64]":
        """int64[N], which entry of `data_path` each sample came from, from 0."""
        files = self._manifest.sources
        groups = np.array([file.group for file in files], dtype=np.int64)
        return self._pick(np.repeat(groups, [file.samples for file in files]))

    @property
    def weights(self) -> list[float] | None:
        """The weight that was given to each entry of `data_path`; None where none was."""
        weights = {file.group: file.weight for file in self._manifest.sources}
        known = [weight for _, weight in sorted(weights.items()) if weight is not None]
        return known or None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the arrays that are trained on, in hex; a view's is of the store's and of its indices."""
        if self._indices is None:
            return self._manifest.fingerprint
        return hashlib.sha256(self._manifest.fingerprint.encode() + self._indices.astype("<i8").tobytes()).hexdigest()

    @property
    def inputs(self) -> str | None:
        """SHA-256 of all that the store was made from, in hex: equal means that preparing again would make the same."""
        return self._manifest.inputs

    @property
    def sha256(self) -> dict[str, str]:
        """SHA-256 of every file of the store but store.json, in hex, by name."""
        return dict(self._manifest.sha256)

    @property
    def settings(self) -> dict[str, Any]:
        """What it was prepared with: tokenizer, format, train_on, max_seq_len, on_overflow, preprocess, seed."""
        return dict(self._manifest.settings)

    @property
    def accounting(self) -> Accounting:
        """Rows read, kept and dropped when the store was prepared; a view has its store's."""
        return self._manifest.accounting

    @cached_property
    def lint(self) -> "LintReport":
        """What the lint found while the store was prepared; a view has its store's."""
        from forge_data._findings import LintReport

        return LintReport.loads((self.path / LINT).read_text("utf-8"), str(self.path / LINT))

    def dropped(self) -> Iterator[dict[str, Any]]:
        """The rows that were left out, in order: file, row, reason, tokens, and place, as messages name it."""
        yield from dropped_rows(self.path, self._manifest.sources)

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """The tokenizer that the store was made with, from the store.

        Raises:
            StoreError: it was made without one.
        """
        from forge_data._tokenizer import load_tokenizer

        if not (self.path / TOKENIZER).is_dir():
            raise StoreError(
                f"{self.path} was made from token ids without a tokenizer; from_jsonl(..., tokenizer=...) keeps one"
            )
        return load_tokenizer(self.path / TOKENIZER)

    def source(self, index: int) -> str:
        """Where a sample came from, such as `train.jsonl:417`."""
        at = self._base(index)
        file = self._manifest.sources[int(np.searchsorted(self._ends, at, side="right"))]
        return place_of(file.name, int(self._arrays["rows.bin"][at]), indexed=file.indexed)

    def select(self, indices: "ArrayLike") -> "TokenStore":
        """A view of some samples, in the order given.

        Raises:
            IndexError: an index outside 0 to N - 1.
            TypeError: indices that are no one-dimensional whole numbers.
        """
        wanted = np.asarray(indices)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise TypeError(f"indices must be a list of whole numbers, got {wanted.dtype}{list(wanted.shape)}")
        wanted = wanted.astype(np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"indices run from {wanted.min()} to {wanted.max()}, the store has 0 to {len(self) - 1}")
        return TokenStore(self.path, self._manifest, wanted if self._indices is None else self._indices[wanted])

    def split(self, fraction: float, seed: int | None = None) -> tuple["TokenStore", "TokenStore"]:
        """(train, held out): a share of the samples held out, the same ones for the same seed on every machine.

        What was one preference or one row is held out whole, and so are samples of the same tokens: none of what is
        measured by was trained on. Without a seed, the one that the store was prepared with draws.

        Raises:
            DataError: the share leaves one of the two without a sample.
        """
        from forge_data._twins import twins_of

        pairs = self.pairs if self.kind == PREFERENCE else None
        count = len(self) if pairs is None else len(pairs)
        parts = split_indices(twins_of(self), fraction, int(self.settings.get("seed", 0)) if seed is None else seed)
        if not all(map(len, parts)):
            raise DataError(
                f"a held-out share of {fraction} of {count} samples leaves {len(parts[0])} to train on and {len(parts[1])} "
                "held out; change validation_split, or give a file of held-out rows as eval_data_path"
            )
        train, held_out = parts if pairs is None else (pairs[part].reshape(-1) for part in parts)
        return self.select(train), self.select(held_out)

    def verify(self) -> None:
        """Read every byte and hold it against the SHA-256 that was taken while writing.

        Raises:
            StoreError: naming the first file that differs.
        """
        verify(self.path, self._manifest)

    @cached_property
    def _ends(self) -> "NDArray[np.int64]":
        return np.cumsum([file.samples for file in self._manifest.sources])

    def _base(self, index: int) -> int:
        at = operator.index(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"sample {at} of a store of {len(self)}")
        at %= len(self)
        return at if self._indices is None else int(self._indices[at])

    def _pick(self, values: "NDArray[Any]") -> "NDArray[np.int64]":
        return (values if self._indices is None else values[self._indices]).astype(np.int64)


def _reopen(path: Path, fingerprint: str, indices: "NDArray[np.int64] | None") -> TokenStore:
    store = TokenStore.open(path)
    if store.fingerprint != fingerprint:
        raise StoreError(f"{path} was prepared anew since this store was sent here; open it again")
    return store if indices is None else store.select(indices)
