"""URL → files of any file system of fsspec, with errors that name the URL."""

from __future__ import annotations

import hashlib
import importlib
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forge._disk import known_remedy
from forge._errors import SettingsError, StorageError

BLOCK = 8 * 2**20


class Remote:
    """Directory at a URL.

    Args:
        url: of any file system that fsspec knows, or a path.

    Raises:
        SettingsError: no such file system, or its package is not installed.

    """

    def __init__(self, url: str) -> None:
        self.url = url
        fsspec: Any = importlib.import_module("fsspec")
        try:
            self._system, root = fsspec.url_to_fs(url)
        except ImportError as error:
            extra = "pip install 'forge-llm[s3]'" if url.startswith("s3://") else str(error)
            raise SettingsError(f"checkpoint_storage {url}: needs a package that is not installed: {extra}") from error
        except ValueError as error:
            raise SettingsError(
                f"checkpoint_storage {url}: {error}. Give a URL of fsspec such as s3://bucket/run, or a path."
            ) from error
        except Exception as error:  # what a file system of fsspec raises is its own
            raise SettingsError(
                f"checkpoint_storage {url}: cannot be opened ({' '.join(str(error).split()) or type(error).__name__}). Give a "
                "URL of fsspec such as s3://bucket/run, or a path."
            ) from error
        self._root = root.rstrip("/")

    @property
    def local_folder(self) -> Path | None:
        """Folder on this machine's file systems; None for a remote one."""
        kinds = (self._system.protocol,) if isinstance(self._system.protocol, str) else self._system.protocol
        return Path(self._root) if "file" in kinds else None

    def check_writable(self) -> None:
        """Raise StorageError unless a file can be written, read back and removed."""
        name, text = f".forge-{secrets.token_hex(4)}", secrets.token_hex(8).encode()
        with self._named("cannot be written"):
            there = self._system.exists(self._root)
            self._write(name, iter([text]))
            found = self.read(name)
            self.remove(name)
            if not there and self._system.isdir(self._root):
                self._system.rmdir(self._root)
        if found != text:
            raise StorageError(f"checkpoint_storage {self.url}: what was written to it is not what is read back.")

    def names(self) -> dict[str, int]:
        """Return the bytes of every file by its name below the URL; none where nothing is there."""
        with self._named("cannot be listed"):
            self._system.invalidate_cache()
            try:
                found = self._system.find(self._root, detail=True)
            except FileNotFoundError:
                return {}
        start = len(self._root) + 1
        return {path[start:]: int(about["size"] or 0) for path, about in found.items()}

    def read(self, name: str) -> bytes:
        """Read a small file. Raises FileNotFoundError where there is none."""
        with self._named(f"{name} cannot be read", missing=True):
            self._system.invalidate_cache()
            return self._system.cat_file(self._path(name))

    def write(self, name: str, content: Iterator[bytes]) -> tuple[int, str]:
        """Write a file; return its bytes and SHA-256."""
        with self._named(f"{name} cannot be written"):
            return self._write(name, content)

    def fetch(self, name: str, target: Path, progress: Callable[[int], None]) -> tuple[int, str]:
        """Copy a file to a new local one; return its bytes and SHA-256.

        Raises:
            FileNotFoundError: there is none.

        """
        digest, size = hashlib.sha256(), 0
        with self._named(f"{name} cannot be read", missing=True):
            source = self._system.open(self._path(name), "rb")
        with source, target.open("xb") as file:
            while True:
                with self._named(f"{name} cannot be read"):
                    block = source.read(BLOCK)
                if not block:
                    break
                file.write(block)
                digest.update(block)
                size += len(block)
                progress(len(block))
            file.flush()
            os.fsync(file.fileno())
        return size, digest.hexdigest()

    def remove(self, name: str) -> None:
        """Remove a file, if it is there, and the directories that it leaves empty."""
        path = self._path(name)
        with self._named(f"{name} cannot be removed"):
            with suppress(FileNotFoundError):
                self._system.rm_file(path)
            parent = path.rpartition("/")[0]
            while len(parent) > len(self._root):
                self._system.invalidate_cache()
                # An object store has no directories that could be left.
                with suppress(FileNotFoundError):
                    if not self._system.isdir(parent) or self._system.ls(parent, detail=False):
                        break
                    self._system.rmdir(parent)
                parent = parent.rpartition("/")[0]

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _write(self, name: str, content: Iterator[bytes]) -> tuple[int, str]:
        path, digest, size = self._path(name), hashlib.sha256(), 0
        self._system.makedirs(path.rpartition("/")[0], exist_ok=True)
        opened = False
        try:
            with self._system.open(path, "wb") as file:
                opened = True
                for block in content:
                    file.write(block)
                    digest.update(block)
                    size += len(block)
                file.flush()
                if (descriptor := _descriptor(file)) is not None:
                    os.fsync(descriptor)
        except BaseException:
            # No half of a file under its name: it is copied again, and nobody takes it for whole meanwhile. One that could not
            # be opened is somebody's.
            if opened:
                with suppress(Exception):
                    self._system.rm_file(path)
            raise
        return size, digest.hexdigest()

    @contextmanager
    def _named(self, what: str, *, missing: bool = False) -> Iterator[None]:
        """Raise what a file system raises as StorageError; with `missing` FileNotFoundError passes."""
        try:
            yield
        except (StorageError, LocalFileError):
            raise
        except Exception as error:
            if missing and isinstance(error, FileNotFoundError):
                raise
            why = " ".join((getattr(error, "strerror", None) or str(error) or type(error).__name__).split()).rstrip(".")
            if isinstance(error, NotImplementedError):
                why = "addresses of this kind can only be read"
            check = "check the address, what you may do there, and the network"
            if self.local_folder is not None:
                check = known_remedy(error) or check
            raise StorageError(f"checkpoint_storage {self.url}: {what}: {why}. {check[:1].upper()}{check[1:]}.") from error


def _descriptor(file: Any) -> int | None:
    """Return the descriptor of a disk's file; None for an object store's."""
    try:
        return int(file.fileno())
    except (OSError, AttributeError):
        return None


class LocalFileError(Exception):
    """A file of the run directory vanished while it was copied."""
