"""`.json` file → rows: an array, read piece by piece, or one document; numbered from 0."""

import codecs
import json
from collections.abc import Iterable, Iterator
from typing import BinaryIO

import attrs

from forge_data._errors import DataError
from forge_data._values import ROW_DECODER
from forge_data.reading._file import DataFile, to_utf8
from forge_data.reading._jsonl import JsonLines, fault_of
from forge_data.reading._record import Chunk, Record, Refused, place_of, record

_BLOCK = 1 << 18
_BLANKS = " \t\r\n"
# An error within so many characters of the end of the buffer may only mean that the rest was not read yet (a literal, an
# escape).
_CUT = 16


def open_json(name: str, file: DataFile) -> "JsonLines | JsonDocument":
    """Decide what a `.json` file is: lines of objects, or one document.

    Raises:
        DataError: it cannot be read.
    """
    with file.opened() as opened:
        first = b""
        while not first.strip() and (line := opened.readline(_BLOCK)):
            first = line.removeprefix(codecs.BOM_UTF8)
    if first.lstrip()[:1] == b"[":
        return JsonDocument(name, file)
    try:
        ROW_DECODER.decode(first.decode("utf-8"))
    except (ValueError, RecursionError):
        # Cut short, it is one object over many lines, or a line that is longer than the block that was read.
        if first.strip() in (b"{", b"{}") or (first.endswith(b"\n") and first.rstrip()[-1:] in (b"{", b"[", b",")):
            return JsonDocument(name, file)
    return JsonLines(name, file)


def value_chunks(name: str, items: Iterable[tuple[int, object, int]], size: int) -> Iterator["Values"]:
    """Yield rows (number, value, bytes) in chunks of about `size` bytes."""
    rows: list[tuple[int, object, int]] = []
    held = 0
    for item in items:
        rows.append(item)
        held += item[2]
        if held >= size:
            yield Values(name, rows, held)
            rows, held = [], 0
    if rows:
        yield Values(name, rows, held)


@attrs.frozen
class JsonDocument:
    """One JSON value over a whole file: an array of rows, or a single row."""

    name: str
    file: DataFile
    indexed = True

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield rows as they were read, about `size` bytes at a time."""
        with self.file.opened() as opened:
            items = enumerate(_Items(self.name, opened).items())
            yield from value_chunks(self.name, ((row, value, taken) for row, (value, taken) in items), size)

    def count(self) -> int | None:
        """Return None: unknown before the file is read."""
        return None

    def digest(self) -> str:
        """Hash the file: SHA-256 in hex."""
        return self.file.digest()


@attrs.frozen
class Values:
    """Rows that were read already: (number, value, bytes) of each."""

    name: str
    rows: list[tuple[int, object, int]]
    size: int
    indexed: bool = True

    @property
    def first_row(self) -> int:
        """Number of its first row."""
        return self.rows[0][0]

    @property
    def last_row(self) -> int:
        """Number of its last row."""
        return self.rows[-1][0]

    def part(self, first: int, last: int) -> "Values":
        """Return the rows with the numbers `first` to `last`, of which there is one at least."""
        rows = [each for each in self.rows if first <= each[0] <= last]
        return Values(self.name, rows, sum(size for _, _, size in rows), self.indexed)

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """Yield the rows; one that is not an object is passed to `refused`, or raised.

        Raises:
            DataError: a row that is not an object, by its place.
        """
        for row, value, size in self.rows:
            try:
                yield record(row, value, size, place_of(self.name, row, indexed=self.indexed))
            except DataError as error:
                if refused is None:
                    raise
                refused(row, error)


class _Items:
    """Items of the array in a file; only text that is not parsed yet is kept in memory."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self._name = name
        self._file = file
        self._text = ""
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self._ended = False

    def items(self) -> Iterator[tuple[object, int]]:
        """Yield (value, characters) of each."""
        if self._next() != "[":
            yield self._value(0)
            self._end()
            return
        self._at += 1
        index = 0
        if self._next() == "]":
            self._at += 1
            return self._end()
        while True:
            yield self._value(index)
            index += 1
            match self._next():
                case ",":
                    self._at += 1
                case "]":
                    self._at += 1
                    return self._end()
                case "":
                    raise DataError(f"{self._name} breaks off after [{index - 1}]: the array is not closed")
                case found:
                    raise DataError(
                        f"{self._name}[{index - 1}] is followed by {found!r}, not by a comma or the end of the array"
                    )

    def _value(self, index: int) -> tuple[object, int]:
        self._next()
        while True:
            try:
                value, end = ROW_DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                whole = error.pos < len(self._text) - _CUT and not error.msg.startswith("Unterminated string")
                if whole or not self._read():
                    near = self._text[max(0, error.pos - 20) : error.pos + 20]
                    comma = index > 0 and error.pos == self._at and self._text.startswith("]", error.pos)
                    said = "a comma stands before the end of the array; take it out" if comma else fault_of(error)
                    raise DataError(f"{self._name}[{index}] is not valid JSON: {said}, near {near!r}") from error
            except RecursionError as error:
                raise DataError(f"{self._name}[{index}] is nested too deeply to be read") from error
            except ValueError as error:
                raise DataError(f"{self._name}[{index}] cannot be read: {error}") from error
            else:
                # A number at the end of the buffer may continue.
                if end < len(self._text) or not self._read():
                    taken, self._at = end - self._at, end
                    return value, taken

    def _next(self) -> str:
        """Return the next character that is not blank; empty at the end."""
        while True:
            while self._at < len(self._text) and self._text[self._at] in _BLANKS:
                self._at += 1
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._read():
                return ""

    def _read(self) -> bool:
        """Read as much again as is buffered, so that a row of any size is parsed a few times only."""
        if self._ended:
            return False
        self._text, self._at = self._text[self._at :], 0
        block = self._file.read(max(_BLOCK, len(self._text)))
        self._ended = not block
        try:
            self._text += self._decoder.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            raise DataError(f"{self._name} is not UTF-8 ({error.reason}); {to_utf8(self._name)}") from error
        return True

    def _end(self) -> None:
        if found := self._next():
            raise DataError(
                f"{self._name} continues after its array with {found!r}; a .json file holds one array, or a row a line"
            )
