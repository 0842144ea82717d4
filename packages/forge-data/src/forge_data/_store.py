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
from forge_data._errors import DataError, StoreError
from forge_data._example import IGNORED, TokenizedExample
from forge_data._format import DTYPES, Manifest, read_manifest
from forge_data._split import split_indices

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray


class TokenStore:
    """N samples on disk; `store[i]` is a `TokenizedExample`, `len(store)` is N.

    Open one with `TokenStore.open(directory)`. `select` and `split` give views: the same files, other samples.
    """

    def __init__(self, path: Path, manifest: Manifest, indices: "NDArray[np.int64] | None" = None) -> None:
        self.path = path
        """The directory."""
        self._manifest = manifest
        self._indices = indices
        self._arrays: dict[str, NDArray[Any]] = {
            name: np.asarray(np.memmap(path / name, dtype=dtype, mode="r")) for name, dtype in DTYPES.items()
        }
        offsets = self._arrays["offsets.bin"]
        if offsets[0] != 0 or offsets[-1] != manifest.tokens or np.any(np.diff(offsets) < 1):
            raise StoreError(
                f"{path / 'offsets.bin'} is damaged: it does not rise from 0 to {manifest.tokens}; prepare the store again"
            )

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> "TokenStore":
        """The store in a directory. Sizes and format are checked; `verify()` checks every byte.

        Raises:
            StoreError: no store, a torn one, or one of another format.
        """
        path = Path(directory).expanduser()
        return cls(path, read_manifest(path))

    def __len__(self) -> int:
        return self._manifest.samples if self._indices is None else len(self._indices)

    def __getitem__(self, index: int) -> TokenizedExample:
        at = self._base(index)
        offsets = self._arrays["offsets.bin"]
        here = slice(int(offsets[at]), int(offsets[at + 1]))
        ids = self._arrays["input_ids.bin"][here]
        return TokenizedExample(ids, np.where(self._arrays["loss_mask.bin"][here], ids, np.int32(IGNORED)))

    def __iter__(self) -> Iterator[TokenizedExample]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"TokenStore({str(self.path)!r}, samples={len(self)}, tokens={int(self.lengths.sum())})"

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
        mask, starts = self._arrays["loss_mask.bin"], self._arrays["offsets.bin"][:-1]
        return self._pick(np.add.reduceat(mask, starts, dtype=np.int64) - mask[starts])

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the arrays that are trained on, in hex; a view's is of the store's and of its indices."""
        if self._indices is None:
            return self._manifest.fingerprint
        return hashlib.sha256(self._manifest.fingerprint.encode() + self._indices.astype("<i8").tobytes()).hexdigest()

    @property
    def accounting(self) -> Accounting:
        """Rows read, kept and dropped when the store was prepared; a view has its store's."""
        return self._manifest.accounting

    def source(self, index: int) -> str:
        """Where a sample came from, such as `train.jsonl:417`."""
        at = self._base(index)
        ends = np.cumsum([source.samples for source in self._manifest.sources])
        name = self._manifest.sources[int(np.searchsorted(ends, at, side="right"))].name
        return f"{name}:{self._arrays['rows.bin'][at]}"

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

    def split(self, fraction: float, seed: int) -> tuple["TokenStore", "TokenStore"]:
        """(train, held out): a share of the samples held out, the same ones for the same seed on every machine.

        Raises:
            DataError: the share leaves one of the two without a sample.
        """
        train, held_out = split_indices(len(self), fraction, seed)
        if not len(train) or not len(held_out):
            raise DataError(
                f"a held-out share of {fraction} of {len(self)} samples leaves {len(train)} to train on and {len(held_out)} "
                "held out; change validation_split, or give a file of held-out rows as eval_data_path"
            )
        return self.select(train), self.select(held_out)

    def verify(self) -> None:
        """Read every byte and hold it against the SHA-256 that was taken while writing.

        Raises:
            StoreError: naming the first file that differs.
        """
        for name, expected in self._manifest.sha256.items():
            with (self.path / name).open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                    raise StoreError(f"{self.path / name} does not hold what was written to it; prepare the store again")

    def _base(self, index: int) -> int:
        at = operator.index(index)
        if not -len(self) <= at < len(self):
            raise IndexError(f"sample {at} of a store of {len(self)}")
        at %= len(self)
        return at if self._indices is None else int(self._indices[at])

    def _pick(self, values: "NDArray[np.int64]") -> "NDArray[np.int64]":
        return values.astype(np.int64) if self._indices is None else values[self._indices].astype(np.int64)


def _reopen(path: Path, fingerprint: str, indices: "NDArray[np.int64] | None") -> TokenStore:
    store = TokenStore.open(path)
    if store.fingerprint != fingerprint:
        raise StoreError(f"{path} was prepared anew since this store was sent here; open it again")
    return store if indices is None else store.select(indices)
