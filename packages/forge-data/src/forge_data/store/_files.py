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
from forge_data.store._manifest import DTYPES, Manifest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forge_data.store._stored_example import Arrays

T = TypeVar("T")

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
            settled = _identity(path) == before and (before is not None or not _being_replaced(path))
            if settled or time.monotonic() > until:
                raise
        time.sleep(_PAUSE_SECONDS)


class Files:
    """Every array of a store, read-only and memory-mapped."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.arrays: Arrays = {}
        self._maps: list[mmap.mmap] = []
        for name in manifest.arrays:
            try:
                self.arrays[name] = self._mapped(path / name, DTYPES[name])
            except (OSError, ValueError) as error:
                raise StoreError(f"{path / name} cannot be read: {error}; prepare the store again") from error
        totals = {"offsets.bin": (manifest.tokens, 1), "segment_offsets.bin": (manifest.segments, 0)}
        totals |= {"record_offsets.bin": (manifest.sizes.get("records.bin", 0), 1)}
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


def verify(path: Path, manifest: Manifest) -> None:
    """Compare every byte of a store with the SHA-256 that was taken while writing.

    Raises:
        StoreError: naming the first file that differs.
    """
    for name, expected in manifest.sha256.items():
        with (path / name).open("rb") as file:
            if hashlib.file_digest(file, "sha256").hexdigest() != expected:
                raise StoreError(f"{path / name} does not hold what was written to it; prepare the store again")


def _identity(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    # The inode of a directory that was removed is soon given to another.
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _being_replaced(path: Path) -> bool:
    """Tell whether another process is between the two renames of `_publish` now."""
    try:
        return any(
            each.name.startswith(f".{path.name}.") and ".partial.replaced-" in each.name for each in path.parent.iterdir()
        )
    except OSError:
        return False
