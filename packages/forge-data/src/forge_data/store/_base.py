"""Base class of TokenStore and PromptStore: location, indexing, views, split, accounting."""

import hashlib
import operator
import os
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from forge_data._accounting import Accounting
from forge_data._errors import DataError, StoreError
from forge_data._media import MANY, Kind, Media
from forge_data._shard import Shard
from forge_data._values import counted
from forge_data.media._read import sha256_of
from forge_data.reading._record import place_of
from forge_data.store._dropped import dropped_rows
from forge_data.store._duplicates import as_digests, digest, grouped
from forge_data.store._fetch import local_directory
from forge_data.store._files import Files, stable, verify
from forge_data.store._held_out import held_out_of, write_held_out
from forge_data.store._manifest import MEDIA, MEDIA_OFFSETS, PROMPTS, TOKENIZER, Manifest, read_manifest
from forge_data.store._media import counts_at, files_at, kinds_at, known_at
from forge_data.store._split import split_indices

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray
    from transformers import PreTrainedTokenizerBase


class Store:
    """N samples or prompts in the files of a directory; views share files, not indices."""

    _of_prompts: ClassVar[bool]
    _plural: ClassVar[str]
    """Name of what it holds, for messages."""

    def __init__(self, path: Path, manifest: Manifest, indices: "NDArray[np.int64] | None" = None) -> None:
        self.path = path
        """Directory of the store."""
        self._manifest = manifest
        self._indices = indices
        self._files = Files(path, manifest)
        self._arrays = self._files.arrays
        self._ids = self._arrays["input_ids.bin"]
        # A memoryview returns Python integers several times as fast as an array.
        self._bounds = self._arrays["offsets.bin"].data
        self._view = None if indices is None else indices.data
        self._count = manifest.samples if indices is None else len(indices)

    @classmethod
    def open(cls, directory: str | os.PathLike[str], *, cache_dir: str | os.PathLike[str] | None = None) -> Self:
        """Open the store in a directory. Sizes and format are checked; `verify()` checks every byte.

        Args:
            directory: path, or URL (`s3://bucket/store`) of a store that is fetched once a machine, and verified meanwhile.
            cache_dir: folder that fetched stores are kept in; one of this user in the temporary directory by default.

        Raises:
            StoreError: no store, a torn one, or one of another format or kind.
        """
        path = local_directory(directory, cache_dir)
        return stable(path, lambda: cls(path, cls._checked_kind(path, read_manifest(path))))

    @classmethod
    def _checked_kind(cls, path: Path, manifest: Manifest) -> Manifest:
        if (manifest.kind == PROMPTS) != cls._of_prompts:
            holds, opens = ("samples", "TokenStore") if cls._of_prompts else ("prompts", "PromptStore")
            raise StoreError(f"{path} is a store of {holds}; open it as a {opens}")
        return manifest

    def __len__(self) -> int:
        return self._count

    def __reduce__(self) -> tuple[Callable[..., "Store"], tuple[Any, ...]]:
        # Another process maps the files itself; a pickled map would contain all tokens.
        return _reopen, (type(self), self.path, self._manifest.fingerprint, self._indices)

    @property
    def kind(self) -> str:
        """Kind of the samples: `supervised`, `preference`, `unpaired_preference` or `prompts`.

        A preference is two samples a row, see `pairs`; `desirable` tells which unpaired answers are wanted.
        """
        return self._manifest.kind

    @cached_property
    def lengths(self) -> "NDArray[np.int64]":
        """int64[N], tokens of each sample."""
        return self._pick(np.diff(self._arrays["offsets.bin"]))

    @cached_property
    def sources(self) -> "NDArray[np.int64]":
        """int64[N], entry of `data_path` that each came from, from 0."""
        files = self._manifest.sources
        groups = np.array([file.group for file in files], dtype=np.int64)
        return self._pick(np.repeat(groups, [file.samples for file in files]))

    @cached_property
    def has_media(self) -> bool:
        """Whether any of its samples or prompts has media, `store[i].media`."""
        if MEDIA_OFFSETS not in self._arrays:
            return False
        return bool(self._pick(np.diff(self._arrays[MEDIA_OFFSETS])).any())

    @cached_property
    def media_counts(self) -> "NDArray[np.int64]":
        """int64[N, 2], how many media each has, and how many of its tokens stand for them."""
        found = np.zeros((len(self), 2), dtype=np.int64)
        if self.has_media:
            at = self._pick(np.arange(len(self._arrays[MEDIA_OFFSETS]) - 1))
            for row in np.flatnonzero(self._pick(np.diff(self._arrays[MEDIA_OFFSETS]))).tolist():
                found[row] = counts_at(self._arrays, int(at[row]))
        return found

    @cached_property
    def media_kinds(self) -> tuple[Kind, ...]:
        """Kinds of media that any of its samples or prompts has: image, audio, in this order."""
        if not self.has_media:
            return ()
        at = self._pick(np.arange(len(self._arrays[MEDIA_OFFSETS]) - 1))
        with_some = at[self._pick(np.diff(self._arrays[MEDIA_OFFSETS])) > 0].tolist()
        found = set[Kind]().union(*(kinds_at(self._arrays, row) for row in with_some))
        return tuple(kind for kind in MANY if kind in found)

    @property
    def weights(self) -> list[float] | None:
        """Weight given to each entry of `data_path`; None where none was."""
        weights = {file.group: file.weight for file in self._manifest.sources}
        known = [weight for _, weight in sorted(weights.items()) if weight is not None]
        return known or None

    @property
    def fingerprint(self) -> str:
        """SHA-256 in hex of the arrays that are trained on; for a view, with its indices."""
        if self._indices is None:
            return self._manifest.fingerprint
        return hashlib.sha256(self._manifest.fingerprint.encode() + self._indices.astype("<i8").tobytes()).hexdigest()

    @property
    def inputs(self) -> str | None:
        """SHA-256 in hex of everything that the store was made from.

        If it is equal, preparing again would make the same store.
        """
        return self._manifest.inputs

    @property
    def sha256(self) -> dict[str, str]:
        """SHA-256 in hex of every file of the store but store.json, by name."""
        return dict(self._manifest.sha256)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings it was prepared with: the tokenizer, and the arguments that decide what is in it."""
        return dict(self._manifest.settings)

    @property
    def shard(self) -> Shard | None:
        """Part of the rows that it holds, where it was prepared as one of several; else None."""
        return self._manifest.shard

    @property
    def accounting(self) -> Accounting:
        """Rows read, kept and dropped when the store was prepared; a view has its store's."""
        return self._manifest.accounting

    def dropped(self) -> Iterator[dict[str, Any]]:
        """List the rows that were left out, in order: file, row, reason, tokens and place."""
        yield from dropped_rows(self.path, self._manifest.sources)

    def tokenizer(self) -> "PreTrainedTokenizerBase":
        """Load the tokenizer that the store was made with, from the store.

        Raises:
            StoreError: it was made without one.
        """
        from forge_data.tokenizing._tokenizer import load_tokenizer

        return load_tokenizer(self._tokenizer_directory())

    @property
    def chat_template(self) -> str | dict[str, str] | None:
        """Chat template of the store's tokenizer: several are a dict by name, None is none.

        A tokenizer of 49,152 tokens takes 0.1 s to load: it is not loaded where it has one template, in a file of its own.

        Raises:
            StoreError: the store was made without a tokenizer.
        """
        from forge_data.tokenizing._tokenizer import stored_chat_template

        return stored_chat_template(self._tokenizer_directory())

    def source(self, index: int) -> str:
        """Return the place of the row that a sample came from, such as `train.jsonl:417`."""
        at = self._stored_index(index)
        file = self._manifest.sources[int(np.searchsorted(self._ends, at, side="right"))]
        return place_of(file.name, int(self._arrays["rows.bin"][at]), indexed=file.indexed)

    def select(self, indices: "ArrayLike") -> Self:
        """Make a view of some samples, in the order given.

        Raises:
            IndexError: an index outside 0 to N - 1.
            TypeError: indices that are not one-dimensional whole numbers.
        """
        wanted = np.asarray(indices)
        if wanted.ndim != 1 or (wanted.size and wanted.dtype.kind not in "iu"):
            raise TypeError(f"indices must be a list of whole numbers, got {wanted.dtype}{list(wanted.shape)}")
        wanted = wanted.astype(np.int64)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= len(self)):
            raise IndexError(f"indices run from {wanted.min()} to {wanted.max()}, the store has 0 to {len(self) - 1}")
        return type(self)(self.path, self._manifest, wanted if self._indices is None else self._indices[wanted])

    def units(self) -> tuple["NDArray[np.int64]", "NDArray[Any]"]:
        """List what a split keeps together: (samples int64[U, k], digests of their ids and images).

        A unit is one sample (k = 1), or chosen and rejected of one preference (k = 2). Digests are equal where ids and images
        are.
        """
        samples = self._unit_samples()
        ids, bounds, views, arrays = self._ids, self._bounds, self._view, self._arrays
        packed = bytearray()
        for unit in samples.tolist():
            at = unit if views is None else [views[index] for index in unit]
            media = b"".join(known_at(arrays, index) for index in at) if MEDIA in arrays else b""
            packed += digest([ids[bounds[index] : bounds[index + 1]] for index in at], media)
        return samples, as_digests(packed)

    def split(self, part: float, seed: int | None = None) -> tuple[Self, Self]:
        """Divide into (train, held out), of which about `part` is held out: a share, or a number.

        A share lies between 0 and 1; a whole number counts samples, of preferences pairs.
        The same samples are held out for the same seed on every machine. Both sides of a preference, everything that came from
        one row, and samples of the same tokens stay together, so that nothing is evaluated on that was trained on. Without a
        seed, the one that the store was prepared with is used.

        Raises:
            DataError: it leaves one of the two empty.
        """
        samples, digests = self.units()
        groups = grouped(digests, self._rows()[samples[:, 0]])
        parts = split_indices(groups, part, int(self.settings.get("seed", 0)) if seed is None else seed)
        if not all(map(len, parts)):
            asked = f"number of {part}" if isinstance(part, int) else f"share of {part}"
            raise DataError(
                f"a held-out {asked} of {counted(len(groups), self._plural)} leaves {len(parts[0])} to train on "
                f"and {len(parts[1])} held out; change `validation_split`, or give a file of held-out rows as `eval_data_path`"
            )
        train, held_out = parts
        return self.select(samples[train].reshape(-1)), self.select(samples[held_out].reshape(-1))

    def record_as_held_out(self) -> None:
        """Write the indices of this view beside the store, for `show` and `stats` to mark."""
        at = range(self._count) if self._indices is None else self._indices.tolist()
        write_held_out(self.path, self._manifest.fingerprint, list(at))

    @property
    def held_out(self) -> frozenset[int]:
        """Indices of samples that the run of this store does not train on (`record_as_held_out`).

        Empty of a store that is of no run, and of a view, whose samples have other numbers.

        Raises:
            StoreError: the file with them is damaged.
        """
        return frozenset() if self._indices is not None else held_out_of(self.path, self._manifest.fingerprint, self._count)

    def verify(self, *, changed: bool = False) -> None:
        """Read every byte and compare it with the SHA-256 that was taken while writing.

        Args:
            changed: read only arrays that were written to since this store was opened, as their size and time tell; it costs
                nothing where there are none. One that was removed is passed over, since what is open stays as it was.

        Raises:
            StoreError: naming the first file that differs, with both hashes.
        """
        verify(self.path, self._manifest, self._files.stamps if changed else None)

    @property
    def media_directories(self) -> list[str | None]:
        """Directory of each source in which relative paths of images begin."""
        return [source.directory for source in self._manifest.sources]

    def media_are_there(self) -> bool:
        """Tell whether the files of all images are there, with the bytes that they had."""
        return all(sha256_of(Media("", path)) == sha256 for path, sha256 in self.media_files)

    @cached_property
    def media_files(self) -> frozenset[tuple[str, str]]:
        """Path and SHA-256 of each image that is a file, as it was prepared."""
        if not self.has_media:
            return frozenset()
        at = self._pick(np.arange(len(self._arrays[MEDIA_OFFSETS]) - 1))
        return frozenset(found for each in at.tolist() for found in files_at(self._arrays, each))

    def _tokenizer_directory(self) -> Path:
        if not (self.path / TOKENIZER).is_dir():
            raise StoreError(f"{self.path} was made from token ids without a tokenizer; give one when it is made, to keep it")
        return self.path / TOKENIZER

    def _slice(self, indices: slice) -> Self:
        return self.select(np.arange(len(self))[indices])

    def _unit_samples(self) -> "NDArray[np.int64]":
        """Return int64[U, k], the samples of each unit."""
        return np.arange(len(self), dtype=np.int64)[:, None]

    @cached_property
    def _ends(self) -> "NDArray[np.int64]":
        return np.cumsum([file.samples for file in self._manifest.sources])

    def _rows(self) -> "NDArray[np.int64]":
        """Return int64[N], a number for the row that each sample came from."""
        at = np.arange(len(self)) if self._indices is None else self._indices
        # A row is known by its file, which several sources may read each in its own way, and its number there.
        paths = [source.path for source in self._manifest.sources]
        first = {path: number for number, path in reversed(list(enumerate(paths)))}
        files = np.array([first[path] for path in paths], dtype=np.int64)[np.searchsorted(self._ends, at, side="right")]
        return np.unique(np.stack((files, self._arrays["rows.bin"][at])), axis=1, return_inverse=True)[1].reshape(-1)

    def _stored_index(self, index: int) -> int:
        try:
            at = operator.index(index)
        except TypeError:
            raise TypeError(
                f"an index is a whole number or a slice, not {type(index).__name__}; select(...) takes many"
            ) from None
        if not -len(self) <= at < len(self):
            raise IndexError(f"{'prompt' if self._of_prompts else 'sample'} {at} of a store of {len(self)}")
        at %= len(self)
        return at if self._indices is None else int(self._indices[at])

    def _pick(self, values: "NDArray[Any]") -> "NDArray[np.int64]":
        return (values if self._indices is None else values[self._indices]).astype(np.int64)


def _reopen(kind: type[Store], path: Path, fingerprint: str, indices: "NDArray[np.int64] | None") -> Store:
    store = kind.open(path)
    if store.fingerprint != fingerprint:
        raise StoreError(f"{path} was prepared anew since this store was pickled; open it again")
    return store if indices is None else store.select(indices)
