"""Files of a store → memory-mapped arrays, all of one store even while it is being replaced."""

import hashlib
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from forge_data._errors import StoreError
from forge_data.store._manifest import (
    DTYPES,
    MANIFEST,
    MEDIA,
    MEDIA_FILE_OFFSETS,
    MEDIA_FILES,
    MEDIA_OFFSETS,
    SPAN_OFFSETS,
    SPANS,
    TEACHER_IDS,
    TEACHER_OFFSETS,
    Manifest,
    fingerprint_of,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forge_data.store._stored_example import Arrays

T = TypeVar("T")
Stamp = tuple[int, int, int]
"""Inode, size and modification time of a file."""

_TIMEOUT_SECONDS = 5.0
_PAUSE_SECONDS = 0.01


def stable(path: Path, read: Callable[[], T]) -> T:
    """Return what `read` finds in one directory; read again if it was replaced meanwhile.

    Raises:
        StoreError, OSError: what `read` raised while nothing was replaced.
    """
    until = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        before = _identity(path)
        try:
            found = read()
            if _identity(path) == before:
                return found
        except (StoreError, OSError):
            settled = _identity(path) == before and (before is not None or _absent(path))
            if settled or time.monotonic() > until:
                raise
        time.sleep(_PAUSE_SECONDS)


class Files:
    """Every array of a store, read-only and memory-mapped."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.arrays: Arrays = {}
        self.stamps = {name: stamp_of(path / name) for name in manifest.arrays}
        """Stamp of each array when it was opened."""
        self._maps: list[mmap.mmap] = []
        for name in manifest.arrays:
            try:
                self.arrays[name] = self._mapped(path / name, DTYPES[name])
            except (OSError, ValueError) as error:
                raise StoreError(f"{path / name} cannot be read: {error}; prepare the store again") from error
        totals = {"offsets.bin": (manifest.tokens, 1), "segment_offsets.bin": (manifest.segments, 0)}
        totals |= {"record_offsets.bin": (manifest.sizes.get("records.bin", 0), 1)}
        totals |= {
            offsets: (manifest.sizes.get(name, 0) // DTYPES[name].itemsize, 0)
            for offsets, name in (
                (MEDIA_OFFSETS, MEDIA),
                (MEDIA_FILE_OFFSETS, MEDIA_FILES),
                (TEACHER_OFFSETS, TEACHER_IDS),
                (SPAN_OFFSETS, SPANS),
            )
        }
        for name, (total, least) in totals.items():
            if name not in self.arrays:
                continue
            offsets = self.arrays[name]
            if offsets[0] != 0 or offsets[-1] != total or np.any(np.diff(offsets) < least):
                raise StoreError(f"{path / name} is damaged: it does not rise from 0 to {total}; prepare the store again")

    def release(self) -> None:
        """Give back the memory of what was read; reading it again maps it again.

        The kernel would take it when it needs it, but until then a pass over a store seems to hold all of it.
        """
        if hasattr(mmap, "MADV_DONTNEED"):
            for each in self._maps:
                each.madvise(mmap.MADV_DONTNEED)

    def _mapped(self, path: Path, dtype: "np.dtype[Any]") -> "NDArray[Any]":
        with path.open("rb") as file:
            if not os.fstat(file.fileno()).st_size:  # an empty file cannot be mapped
                return np.zeros(0, dtype)
            self._maps.append(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        return np.frombuffer(self._maps[-1], dtype)


def verify(path: Path, manifest: Manifest, stamps: dict[str, Stamp | None] | None = None) -> None:
    """Compare every byte of a store with the SHA-256 that was taken while writing.

    Args:
        path: directory of the store.
        manifest: what its `store.json` holds.
        stamps: name → stamp of the files to read if theirs is another now, which is then kept here; None reads every file.

    Raises:
        StoreError: naming the first file that differs, with both hashes.
    """
    if fingerprint_of(manifest.kind, manifest.sha256) != manifest.fingerprint:
        raise StoreError(
            f"{path / MANIFEST} is damaged: its fingerprint {manifest.fingerprint} is not that of the files that it names; "
            "prepare the store again"
        )
    for name, expected in manifest.sha256.items():
        now = stamp_of(path / name)
        if stamps is not None and (name not in stamps or now in (None, stamps[name])):
            continue
        try:
            with (path / name).open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise StoreError(f"{path / name} cannot be read: {error.strerror or error}; prepare the store again") from error
        if found != expected:
            raise StoreError(
                f"{path / name} does not hold what was written to it: its SHA-256 is {found}, and {expected} was written; "
                "prepare the store again"
            )
        if stamps is not None:
            stamps[name] = now


def stamp_of(path: Path) -> Stamp | None:
    """Return what changes when a file is written to; None where there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # The inode of a directory that was removed is soon given to another.
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _absent(path: Path) -> bool:
    """Tell whether nothing is there, and nothing is about to be."""
    # Looked for before and after: a replacement may end between the first look and the search for its traces.
    return not _being_replaced(path) and _identity(path) is None


def _being_replaced(path: Path) -> bool:
    """Tell whether another process is between the two renames of `_publish` now."""
    try:
        return any(
            each.name.startswith(f".{path.name}.") and ".partial.replaced-" in each.name for each in path.parent.iterdir()
        )
    except OSError:
        return False
