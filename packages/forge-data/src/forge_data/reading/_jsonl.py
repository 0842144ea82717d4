"""JSONL file → values, line by line, each error with its line.

The json module reads it, and not `datasets`: an Arrow table has one schema, so a key that one row has and another lacks becomes
null in the other, also within the arguments of a tool call, and the line that a row came from is lost.
"""

import json
from collections.abc import Iterator
from typing import BinaryIO

import attrs

from forge_data._errors import DataError
from forge_data._values import ROW_DECODER
from forge_data.reading._file import DataFile, to_utf8
from forge_data.reading._record import Chunk, Record, Refused, record

_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")
_BLOCK = 1 << 20


@attrs.frozen
class JsonLines:
    """One JSON value a line, UTF-8, with or without byte order mark; blank lines are skipped."""

    name: str
    file: DataFile
    indexed = False

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield whole lines: offsets where a worker can seek itself, bytes elsewhere."""
        offset, row = 0, 1
        with self.file.opened() as file:
            for lines in _stretches(file, size):
                count = lines.count(b"\n") + (not lines.endswith(b"\n"))
                if row == 1 and lines.startswith(_WIDE_BOMS):
                    raise DataError(f"{self.name}:1 begins with a UTF-16 byte order mark; {to_utf8(self.name, utf_16=True)}")
                if not lines.isspace():
                    if self.file.plain:
                        yield FileLines(self.name, row, row + count - 1, self.file, offset, len(lines))
                    else:
                        yield Lines(self.name, row, row + count - 1, lines)
                offset, row = offset + len(lines), row + count

    def count(self) -> int | None:
        """Count the lines in the file; None where it would have to be fetched for that."""
        if self.file.local is None:
            return None
        lines, last = 0, b"\n"
        with self.file.opened() as file:
            while block := file.read(_BLOCK):
                lines += block.count(b"\n")
                last = block
        return lines + (not last.endswith(b"\n"))

    def row_numbers(self) -> Iterator[int]:
        """Yield the lines that are not blank, from 1."""
        with self.file.opened() as file:
            for row, line in enumerate(file, 1):
                if not _is_blank(row, line):
                    yield row

    def digest(self) -> str:
        """Hash the file: SHA-256 in hex."""
        return self.file.digest()


@attrs.frozen
class Lines:
    """Some lines of a file, as bytes."""

    name: str
    first_row: int
    last_row: int
    lines: bytes

    @property
    def size(self) -> int:
        """Bytes of the lines."""
        return len(self.lines)

    def part(self, first: int, last: int) -> "Lines":
        """Return the lines with the numbers `first` to `last`, of which there is one at least."""
        first, last = max(first, self.first_row), min(last, self.last_row)
        lines = self.lines.split(b"\n")[first - self.first_row : last - self.first_row + 1]
        return Lines(self.name, first, last, b"".join(line + b"\n" for line in lines))

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """Yield the rows; one that cannot be read is passed to `refused`, or raised.

        Raises:
            DataError: a line that is not UTF-8, not JSON or not an object, or names a key twice, by `file:line`.
        """
        return _records(self.name, self.first_row, self.lines, refused)


@attrs.frozen
class FileLines:
    """Some lines of a file, by offset; the worker reads them there."""

    name: str
    first_row: int
    last_row: int
    file: DataFile
    offset: int
    size: int

    def part(self, first: int, last: int) -> Lines:
        """Return the lines with the numbers `first` to `last`, of which there is one at least."""
        return self._read().part(first, last)

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """Yield the rows; one that cannot be read is passed to `refused`, or raised.

        Raises:
            DataError: as of `Lines`; the file has become shorter.
        """
        return self._read().records(refused)

    def _read(self) -> Lines:
        with self.file.opened() as file:
            file.seek(self.offset)
            lines = file.read(self.size)
        if len(lines) != self.size:
            raise DataError(f"{self.file.path} became shorter while it was read; let nothing write to it meanwhile")
        return Lines(self.name, self.first_row, self.last_row, lines)


def _stretches(file: BinaryIO, size: int) -> Iterator[bytes]:
    """Yield whole lines, about `size` bytes at a time; a longer line alone."""
    rest: list[bytes] = []
    while block := file.read(size):
        end = block.rfind(b"\n") + 1
        if end:
            yield b"".join([*rest, block[:end]])
            rest = [block[end:]] if end < len(block) else []
        else:
            rest.append(block)
    if rest:
        yield b"".join(rest)


def _records(name: str, first_row: int, lines: bytes, refused: Refused | None) -> Iterator[Record]:
    for row, line in enumerate(lines.split(b"\n"), start=first_row):
        if _is_blank(row, line):
            continue
        text = line.removeprefix(_BOM) if row == 1 else line
        place = f"{name}:{row}"
        try:
            yield record(row, _value(place, text), len(text) + 1, place)
        except DataError as error:
            if refused is None:
                raise
            refused(row, error)


def _is_blank(row: int, line: bytes) -> bool:
    text = line.removeprefix(_BOM) if row == 1 else line
    return not text or text.isspace()


def _value(place: str, line: bytes) -> object:
    try:
        return ROW_DECODER.decode(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(
            f"{place} is not UTF-8: byte 0x{line[error.start]:02x} at position {error.start + 1} of the line "
            f"({error.reason}); {to_utf8(place.rpartition(':')[0])}"
        ) from error
    except json.JSONDecodeError as error:
        where = f"{fault_of(error)} at column {error.colno}"
        said = _habit(error.doc, error.pos) or f"{where}{_remedy(error.doc, error.pos)}"
        raise DataError(f"{place} is not valid JSON: {said}") from error
    except RecursionError as error:
        raise DataError(f"{place} is nested too deeply to be read") from error
    except ValueError as error:
        raise DataError(f"{place} cannot be read: {error}") from error


def fault_of(error: json.JSONDecodeError) -> str:
    """Return the decoder's message without the "at" with which some of them end."""
    return error.msg.removesuffix(" at")


def _habit(line: str, at: int) -> str:
    """Name a slip that is common in lines of other tools, or "".

    In the same words for each line, so that the lint counts it once.
    """
    start = line.strip()
    if start.endswith(",") and line[at:].strip() in ("", ","):
        if start.startswith("[{"):
            return "the file looks like one JSON array: name it .json, or write its items alone (`jq -c '.[]'` does)"
        if start.startswith("{"):
            return "a comma ends the line; take it out, as rows are lines of their own"
    if start.startswith("{'"):
        return "its quotes are single, as Python prints a dict; write it with json.dumps"
    return ""


def _remedy(line: str, at: int) -> str:
    start = line.strip()
    if start in ("[", "[{"):
        return "; the file looks like one JSON array over many lines: write one object a line (`jq -c '.[]'` does)"
    if start == "{":
        return "; the file looks like JSON objects over many lines each: write one object a line (`jq -c .` does)"
    found = line.strip()[:60] if at < 60 else line[at - 30 : at + 30].strip()
    return f"; found {found!r}; write one complete object a line"
