"""Batches → a token store on disk, in bounded memory: complete, or not there."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Self

import attrs
import numpy as np

from forge_data._disk import unwritten
from forge_data._errors import StoreError
from forge_data.store._dropped import Dropped, dropped_lines
from forge_data.store._manifest import (
    ALONE,
    DROPPED,
    DTYPES,
    LINT,
    MANIFEST,
    MEDIA,
    MEDIA_FILE_OFFSETS,
    MEDIA_OFFSETS,
    OF_MEDIA,
    OF_TEACHER,
    OPTIONAL,
    SHARED,
    SPAN_OFFSETS,
    SPANS,
    SUPERVISED,
    TEACHER_OFFSETS,
    TOKENIZER,
    WEIGHTS,
    Manifest,
    arrays_of,
    fingerprint_of,
)
from forge_data.store._partial import partial_of
from forge_data.store._publish import put_in_place, require_room, sync_directory, sync_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from forge_data._accounting import Accounting
    from forge_data._shard import Shard
    from forge_data.store._base import Store
    from forge_data.store._manifest import SourceFile

_BLOCK = 1 << 20
_CUMULATIVE = {
    *("offsets.bin", "segment_offsets.bin", "record_offsets.bin"),
    *(MEDIA_OFFSETS, MEDIA_FILE_OFFSETS, TEACHER_OFFSETS, SPAN_OFFSETS),
}


class StoreWriter:
    """Context that writes a store beside its place and moves it there when `commit` is called.

    Left in any other way, by an error or Ctrl-C too, it removes whatever it made, and what was there before stays.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.samples = 0
        self.tokens = 0
        self.partial = partial_of(directory)
        """Directory in which the store is written until it is complete."""
        self._ends = dict.fromkeys(_CUMULATIVE, 0)
        self._weighed = 0
        self._turned = 0
        self._pictured = 0
        self._made: list[Path] = []
        self._committed = False
        self._stack = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._hashes = {name: hashlib.sha256() for name in (*DTYPES, DROPPED)}

    def __enter__(self) -> Self:
        require_room(self.directory)
        try:
            self._make_parents()
            self.partial.mkdir()
            for name in self._hashes:
                self._files[name] = self._stack.enter_context((self.partial / name).open("wb", buffering=1 << 20))
        except OSError as error:
            self._clean()
            raise StoreError(f"no token store can be written at {self.directory}: {unwritten(error)}") from error
        for name in _CUMULATIVE:
            self._write(name, np.zeros(1, dtype=np.int64))
        return self

    def add(self, arrays: dict[str, "np.ndarray[Any, Any]"]) -> None:
        """Append the samples of a `Batch`, or what a teacher has of samples that are there.

        Raises:
            StoreError: the disk does not take it.
        """
        try:
            if WEIGHTS in arrays:
                self._fill_weights()
                self._weighed += len(arrays[WEIGHTS])
            if SHARED in arrays:
                self._fill_shared()
                self._turned += len(arrays[SHARED])
            if MEDIA_OFFSETS in arrays:
                self._fill_media()
                self._pictured += len(arrays[MEDIA_OFFSETS])
            for name, values in arrays.items():
                if name in _CUMULATIVE and len(values):
                    ends = self._ends[name] + np.cumsum(values)
                    self._ends[name] = int(ends[-1])
                    self._write(name, ends)
                elif len(values):
                    self._write(name, values)
        except OSError as error:
            raise StoreError(f"the token store {self.directory} could not be written: {unwritten(error)}") from error
        self.samples += len(arrays.get("offsets.bin", ()))
        self.tokens = self._ends["offsets.bin"]

    def drop(self, file: str, rows: Sequence[Dropped], *, indexed: bool) -> None:
        """Record rows of a file that were left out; `indexed` if its rows are items of a JSON array.

        Raises:
            StoreError: the disk does not take it.
        """
        try:
            self._append(DROPPED, dropped_lines(file, rows, indexed=indexed))
        except OSError as error:
            raise StoreError(f"the token store {self.directory} could not be written: {unwritten(error)}") from error

    def copy(self, store: "Store") -> None:
        """Append the samples and the rows left out of a store; its tokenizer becomes this one's.

        Raises:
            StoreError: the disk does not take it, or the store cannot be read.
        """
        self.add({name: np.diff(array) if name in _CUMULATIVE else array for name, array in store._arrays.items()})
        try:
            with (store.path / DROPPED).open("rb") as lines:
                while block := lines.read(_BLOCK):
                    self._append(DROPPED, block)
            if (store.path / TOKENIZER).is_dir():
                shutil.copytree(store.path / TOKENIZER, self.partial / TOKENIZER, dirs_exist_ok=True)
        except OSError as error:
            raise StoreError(f"{store.path} could not be copied to {self.directory}: {unwritten(error)}") from error

    def finish(
        self,
        kind: str | None,
        sources: list["SourceFile"],
        accounting: "Accounting",
        *,
        tokenizer: "PreTrainedTokenizerBase | None",
        inputs: str | None,
        settings: dict[str, Any],
        shard: "Shard | None" = None,
    ) -> Manifest:
        """Close the arrays, save the tokenizer, and make the manifest; nothing is moved yet.

        Raises:
            StoreError: the disk does not take it.
        """
        kind = kind or SUPERVISED
        try:
            if self._weighed:
                self._fill_weights()
            if self._turned:
                self._fill_shared()
            if self._pictured:
                self._fill_media()
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            self._stack.close()
            given = [name for name in OPTIONAL if (self.partial / name).stat().st_size]
            if MEDIA not in given:
                given = [name for name in given if name not in OF_MEDIA]
                sources = [attrs.evolve(source, directory=None) for source in sources]
            if SPANS not in given:
                given = [name for name in given if name not in OF_TEACHER]
            arrays = arrays_of(kind, given)
            for name in set(DTYPES) - set(arrays):
                (self.partial / name).unlink()
            if tokenizer is not None:
                self._save(tokenizer)
            sha256 = {name: self._hashes[name].hexdigest() for name in (*arrays, DROPPED)}
            sizes = {name: (self.partial / name).stat().st_size for name in sha256}
            for path in sorted(path for path in self.partial.glob(f"{TOKENIZER}/**/*") if path.is_file()):
                self._record(path, sha256, sizes)
        except OSError as error:
            raise StoreError(f"the token store {self.directory} could not be finished: {unwritten(error)}") from error
        return Manifest(
            kind=kind,
            samples=self.samples,
            tokens=self.tokens,
            segments=self._ends["segment_offsets.bin"],
            fingerprint=fingerprint_of(kind, sha256),
            inputs=inputs,
            sha256=sha256,
            sizes=sizes,
            sources=sources,
            accounting=accounting,
            settings=settings,
            shard=shard,
        )

    def commit(self, manifest: Manifest, lint: str | None) -> None:
        """Write the lint's report, if any, and the manifest, and give the store its name.

        A store that was there makes room.

        Raises:
            StoreError: the disk does not take it, or another process made the directory meanwhile.
        """
        try:
            if lint is not None:
                path = self.partial / LINT
                path.write_text(lint, encoding="utf-8")
                self._record(path, manifest.sha256, manifest.sizes)
            path = self.partial / MANIFEST
            path.write_text(manifest.dumps(), encoding="utf-8")
            sync_file(path)
            sync_directory(self.partial)
            put_in_place(self.partial, self.directory)
            self._committed = True
            sync_directory(self.directory.parent)
        except OSError as error:
            raise StoreError(f"the token store {self.directory} could not be finished: {unwritten(error)}") from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._committed:
            self._clean()

    def _record(self, path: Path, sha256: dict[str, str], sizes: dict[str, int]) -> None:
        name = path.relative_to(self.partial).as_posix()
        sha256[name] = hashlib.sha256(path.read_bytes()).hexdigest()
        sizes[name] = path.stat().st_size
        sync_file(path)

    def _save(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        try:
            tokenizer.save_pretrained(self.partial / TOKENIZER)
        except Exception as error:
            # On a full disk the Rust library that writes tokenizer.json raises a bare Exception.
            raise StoreError(
                f"the tokenizer could not be written to {self.directory / TOKENIZER}: {unwritten(error)}"
            ) from error

    def _fill_weights(self) -> None:
        """Write the weights of the tokens so far that came without: 1 where they are learned."""
        self._files["loss_mask.bin"].flush()
        with (self.partial / "loss_mask.bin").open("rb") as mask:
            mask.seek(self._weighed)
            while block := mask.read(_BLOCK):
                self._write(WEIGHTS, np.frombuffer(block, np.uint8))
                self._weighed += len(block)

    def _fill_shared(self) -> None:
        """Write that the samples so far that came without are alone."""
        self._write(SHARED, np.full(self.samples - self._turned, ALONE, dtype=np.int32))
        self._turned = self.samples

    def _fill_media(self) -> None:
        """Write that the samples so far that came without have no images."""
        for name in (MEDIA_OFFSETS, MEDIA_FILE_OFFSETS):
            self._write(name, np.full(self.samples - self._pictured, self._ends[name], dtype=np.int64))
        self._pictured = self.samples

    def _write(self, name: str, values: "np.ndarray[Any, Any]") -> None:
        self._append(name, np.ascontiguousarray(values, dtype=DTYPES[name]).data)

    def _append(self, name: str, data: bytes | memoryview) -> None:
        self._files[name].write(data)
        self._hashes[name].update(data)

    def _make_parents(self) -> None:
        parent = self.directory.parent
        missing = [path for path in (parent, *parent.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir()
            self._made.append(path)

    def _clean(self) -> None:
        try:
            self._stack.close()
        except OSError:  # a full disk refuses the last buffer too; the files are removed anyway
            self._files.clear()
        shutil.rmtree(self.partial, ignore_errors=True)
        for path in reversed(self._made):
            if not any(path.iterdir()):
                path.rmdir()
