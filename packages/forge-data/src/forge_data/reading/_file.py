"""Path or URL → bytes, decompressed where the suffix says that they are compressed."""

import gzip
import hashlib
import importlib
import json
import shlex
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import attrs

from forge_data._errors import DataError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

COMPRESSED = (".gz", ".zst")
_BLOCK = 1 << 20


@attrs.frozen
class DataFile:
    """A file of rows, local or remote. It pickles, so that another process can open it."""

    path: str
    """Absolute path, or URL."""

    @property
    def local(self) -> Path | None:
        """Path on this machine; None for a URL."""
        return None if "://" in self.path else Path(self.path)

    @property
    def suffixes(self) -> tuple[str, str]:
        """(type, compression) by suffix: (".jsonl", ".gz"); the second is empty if there is none."""
        path = PurePosixPath(self.path if self.local is not None else self.path.split("?")[0])
        last = path.suffix.lower()
        return (path.with_suffix("").suffix.lower(), last) if last in COMPRESSED else (last, "")

    @property
    def plain(self) -> bool:
        """Whether another process can seek in it at no cost: it is local and not compressed."""
        return self.local is not None and not self.suffixes[1]

    @contextmanager
    def opened(self, *, decompressed: bool = True) -> Iterator[BinaryIO]:
        """Open the file for reading.

        Raises:
            DataError: it cannot be opened or read, breaks off, or is not compressed as its suffix says.
        """
        try:
            with self._raw() as file:
                if not decompressed or not self.suffixes[1]:
                    yield file
                else:
                    with self._decompressed(file) as text:
                        yield text
        except EOFError as error:
            raise DataError(f"{self.path} breaks off in the middle: it was not written or copied to its end") from error
        except (gzip.BadGzipFile, zlib.error, _zstd_error()) as error:
            raise DataError(f"{self.path} is damaged, or not a {self.suffixes[1]} file: {error}") from error
        except OSError as error:
            raise DataError(f"{self.path} cannot be read: {error.strerror or error}") from error

    def size(self) -> int:
        """Return its size in bytes, as stored."""
        if self.local is not None:
            return self.local.stat().st_size
        return int(filesystem(self.path)[0].size(self.path) or 0)

    def digest(self) -> str:
        """Hash the file as stored: SHA-256 in hex; of the ETag where a remote store has one."""
        if self.local is None:
            info = filesystem(self.path)[0].info(self.path)
            if tag := info.get("ETag"):
                return hashlib.sha256(json.dumps([self.path, str(tag), info.get("size")]).encode()).hexdigest()
        with self.opened(decompressed=False) as file:
            digest = hashlib.sha256()
            while block := file.read(_BLOCK):
                digest.update(block)
        return digest.hexdigest()

    @contextmanager
    def _raw(self) -> Iterator[BinaryIO]:
        if self.local is not None:
            with self.local.open("rb") as file:
                yield file
        else:
            system, path = filesystem(self.path)
            with system.open(path, "rb") as file:
                yield cast("BinaryIO", file)

    def _decompressed(self, file: BinaryIO) -> BinaryIO:
        if self.suffixes[1] == ".gz":
            return cast("BinaryIO", gzip.GzipFile(fileobj=file))
        module = _zstd()
        if module is None:
            raise DataError(f"{self.path} needs a package to be decompressed: pip install 'forge-data[zst]'")
        return module.ZstdFile(file)


def beside(name: str, ending: str) -> tuple[str, str]:
    """Quote a file's name for a shell, and that of a new file beside it.

    >>> beside("my rows.csv", "-utf8.csv"), beside("rows.csv.gz", ".tsv")
    (("'my rows.csv'", "'my rows-utf8.csv'"), ('rows.csv', 'rows.tsv'))
    """
    path = PurePosixPath(name)
    path = path.with_suffix("") if path.suffix.lower() in COMPRESSED else path
    return shlex.quote(str(path)), shlex.quote(str(path.with_suffix("")) + ending)


def to_utf8(name: str, *, utf_16: bool = False) -> str:
    """Say how a file that is not UTF-8 becomes it, to end a message with."""
    old, new = beside(name, f"-utf8{DataFile(name).suffixes[0]}")
    if utf_16:
        return f"save the file as UTF-8 (`iconv -f utf-16 -t utf-8 {old} > {new}`)"
    return f"save the file as UTF-8 (where all of it is in the code page of Windows: `iconv -f cp1252 -t utf-8 {old} > {new}`)"


def filesystem(url: str) -> tuple["AbstractFileSystem", str]:
    """Return fsspec's file system for a URL, and the path in it.

    Raises:
        DataError: a protocol that is not known, or whose package is not installed.
    """
    from fsspec import url_to_fs

    protocol = url.split("://", 1)[0]
    try:
        return url_to_fs(url)
    except ImportError as error:
        extra = f"pip install 'forge-data[{protocol}]'" if protocol == "s3" else str(error)
        raise DataError(f"{url} needs a package that is not installed: {extra}") from error
    except ValueError as error:
        raise DataError(
            f"{url} cannot be opened: {error}; known are paths, s3://, https:// and other protocols of fsspec"
        ) from error


def _zstd() -> Any:
    """Import the module that the standard library has from 3.14 on.

    Other modules stop silently at the end of the first of several frames.
    """
    try:
        return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")
    except ImportError:
        return None


def _zstd_error() -> type[Exception]:
    module = _zstd()
    return module.ZstdError if module is not None else zlib.error
