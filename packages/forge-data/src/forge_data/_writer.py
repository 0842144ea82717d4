"""Examples to a token store on disk, in bounded memory: all of it, or nothing."""

import hashlib
import os
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

import numpy as np

from forge_data._accounting import Accounting
from forge_data._errors import StoreError
from forge_data._example import IGNORED, TokenizedExample
from forge_data._format import DTYPES, FINGERPRINTED, MANIFEST, Manifest, SourceFile


class StoreWriter:
    """A context that writes a store beside its place and moves it there when `commit` is called.

    Left in any other way, by an error or Ctrl-C too, it takes away whatever it made.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.samples = 0
        self.tokens = 0
        self._partial = directory.with_name(f".{directory.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
        self._made: list[Path] = []
        self._committed = False
        self._stack = ExitStack()
        self._files: dict[str, BinaryIO] = {}
        self._hashes = {name: hashlib.sha256() for name in DTYPES}

    def __enter__(self) -> Self:
        if self.directory.exists() and (not self.directory.is_dir() or any(self.directory.iterdir())):
            raise StoreError(f"{self.directory} exists already; give a new directory for the token store, or remove this one")
        try:
            self._make_parents()
            self._partial.mkdir()
            for name in DTYPES:
                self._files[name] = self._stack.enter_context((self._partial / name).open("wb", buffering=1 << 20))
        except OSError as error:
            self._clean()
            raise StoreError(f"no token store can be written at {self.directory}: {error.strerror or error}") from error
        self._write("offsets.bin", np.zeros(1, dtype=np.int64))
        return self

    def add(self, examples: Sequence[TokenizedExample], rows: Sequence[int]) -> None:
        """Append samples; `rows` says which row of the source each came from.

        Raises:
            StoreError: the disk does not take it.
        """
        if not examples:
            return
        ids = np.concatenate([example.input_ids for example in examples])
        mask = np.concatenate([example.labels for example in examples]) != IGNORED
        ends = self.tokens + np.cumsum([len(example) for example in examples])
        try:
            for name, values in {
                "input_ids.bin": ids,
                "loss_mask.bin": mask,
                "offsets.bin": ends,
                "rows.bin": np.asarray(rows),
            }.items():
                self._write(name, values)
        except OSError as error:
            raise StoreError(f"{self._partial} could not be written: {error.strerror or error}") from error
        self.samples += len(examples)
        self.tokens = int(ends[-1])

    def commit(self, sources: list[SourceFile], accounting: Accounting, settings: dict[str, Any]) -> None:
        """Flush everything to the disk and give the store its name.

        Raises:
            StoreError: the disk does not take it, or somebody else made the directory meanwhile.
        """
        sha256 = {name: digest.hexdigest() for name, digest in self._hashes.items()}
        fingerprint = hashlib.sha256("".join(f"{name}:{sha256[name]}\n" for name in FINGERPRINTED).encode()).hexdigest()
        manifest = Manifest(self.samples, self.tokens, fingerprint, sha256, sources, accounting, settings)
        try:
            for file in self._files.values():
                file.flush()
                os.fsync(file.fileno())
            self._stack.close()
            with (self._partial / MANIFEST).open("w", encoding="utf-8") as file:
                file.write(manifest.dumps())
                file.flush()
                os.fsync(file.fileno())
            # Renaming onto an empty directory replaces it; onto a full one it fails, and so it should.
            self._partial.rename(self.directory)
            self._committed = True
            _sync_directory(self.directory.parent)
        except OSError as error:
            raise StoreError(f"the token store {self.directory} could not be finished: {error.strerror or error}") from error

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._committed:
            self._clean()

    def _write(self, name: str, values: "np.ndarray[Any, Any]") -> None:
        data = np.ascontiguousarray(values, dtype=DTYPES[name])
        self._files[name].write(data.data)
        self._hashes[name].update(data.data)

    def _make_parents(self) -> None:
        parent = self.directory.parent
        missing = [path for path in (parent, *parent.parents) if not path.exists()]
        for path in reversed(missing):
            path.mkdir()
            self._made.append(path)

    def _clean(self) -> None:
        try:
            self._stack.close()
        except OSError:  # a full disk refuses the last buffer too; what matters is that the files go
            self._files.clear()
        shutil.rmtree(self._partial, ignore_errors=True)
        for path in reversed(self._made):
            if not any(path.iterdir()):
                path.rmdir()


def _sync_directory(directory: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open a directory
        return
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
