"""A path to the rows of its file, one by one, each with its number."""

import errno
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from forge_data._describe import describe
from forge_data._errors import DataError
from forge_data._read_jsonl import JsonLines
from forge_data._read_parquet import ParquetFile


class Record(NamedTuple):
    """One row as it was read."""

    row: int
    """1-based: the line of a JSONL file, blank ones counted, or the row of a Parquet file."""

    fields: dict[str, Any]
    """What the row holds; a field that is null counts as absent."""

    size: int
    """Bytes it took in the file, roughly; batches are cut by it so that memory stays bounded."""


class Source(Protocol):
    """A file of rows that is read front to back in bounded memory."""

    @property
    def path(self) -> Path:
        """Where the file is."""
        ...

    def rows(self) -> Iterator[tuple[int, object, int]]:
        """(row, value, bytes) of every row."""
        ...

    def count(self) -> int:
        """The number of the last row; quick, for a progress bar's total."""
        ...


_SUFFIXES: dict[str, type[JsonLines] | type[ParquetFile]] = {
    ".json": JsonLines,
    ".jsonl": JsonLines,
    ".ndjson": JsonLines,
    ".parquet": ParquetFile,
}
_KINDS = {stat.S_IFIFO: "a named pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def open_source(data_path: str) -> Source:
    """The reader for a file, chosen by its suffix.

    Raises:
        DataError: no file there that can be read, a directory, an empty file, or a suffix that no reader knows.
    """
    path, size = _regular(data_path)
    reader = _SUFFIXES.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{data_path} has a suffix that is not known ({path.suffix or 'none'}); known: {', '.join(_SUFFIXES)}")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise DataError(f"{data_path} cannot be read: {error.strerror}") from error
    if size == 0:
        raise DataError(f"{data_path} is empty: it holds no rows")
    return reader(path)


def _regular(data_path: str) -> tuple[Path, int]:
    """The path of a regular file and its bytes."""
    try:
        path = Path(data_path).expanduser()
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"no file at {data_path!r} (looked from {Path.cwd()}); check the path") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise DataError(f"{data_path} is not a regular file but a loop of symbolic links; check the path") from error
        raise DataError(f"{data_path} cannot be read: {error.strerror}") from error
    except (ValueError, RuntimeError) as error:
        # A null byte, or a ~user that there is not.
        raise DataError(f"{data_path!r} is no path to a file: {error}") from error
    if stat.S_ISDIR(found.st_mode):
        raise DataError(f"{data_path} is a directory; give one file: {', '.join(_SUFFIXES)}")
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise DataError(f"{data_path} is not a regular file but {kind}; write the rows to a file and give that")
    return path, found.st_size


def read(source: Source) -> Iterator[Record]:
    """Every row of a file as a `Record`.

    Raises:
        DataError: a row that is broken or no object, with file and row; a file without any row.
    """
    empty = True
    for row, value, size in source.rows():
        if not isinstance(value, dict):
            raise DataError(
                f"{source.path.name}:{row} is not an object but {describe(value)}; each line holds one row, "
                'such as {"messages": [...]}'
            )
        empty = False
        yield Record(row, {name: field for name, field in value.items() if field is not None}, size)
    if empty:
        raise DataError(f"{source.path} holds no rows")
