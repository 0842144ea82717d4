"""CSV or TSV file → rows: the first line names the fields, every cell is text as it is.

Python's csv module reads it, and not `datasets`: pandas, which reads it there, guesses types a block at a time, so that "007"
becomes 7 and the answer "None" becomes null, and fills lines that are too short.
"""

import codecs
import csv
import io
import sys
from collections.abc import Iterator
from typing import Any

import attrs

from forge_data._errors import DataError
from forge_data._values import counted
from forge_data.reading._file import DataFile, beside, to_utf8
from forge_data.reading._json import Values
from forge_data.reading._record import Chunk

_MARKS = ";\t|,"
"""What delimits cells elsewhere."""


@attrs.frozen
class CsvFile:
    """Rows of cells; the number of a row is the line that it begins in."""

    name: str
    file: DataFile
    delimiter: str
    indexed = False

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield rows as they were read, about `size` bytes at a time."""
        rows: list[tuple[int, object, int]] = []
        held = 0
        for number, value in self._rows():
            taken = sum(map(len, value.values()))
            rows.append((number, value, taken))
            held += taken
            if held >= size:
                yield Values(self.name, rows, held, indexed=False)
                rows, held = [], 0
        if rows:
            yield Values(self.name, rows, held, indexed=False)

    def count(self) -> int | None:
        """Return None: unknown before the file is read, since a cell may hold line ends."""
        return None

    def row_numbers(self) -> Iterator[int]:
        """Yield the line that each row begins in."""
        return (number for number, _ in self._rows())

    def digest(self) -> str:
        """Hash the file: SHA-256 in hex."""
        return self.file.digest()

    def _rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        # A cell may hold a document; the module's default limit is 131,072 characters.
        csv.field_size_limit(max(csv.field_size_limit(), min(sys.maxsize, 2**31 - 1)))
        with self.file.opened() as opened, io.TextIOWrapper(opened, encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter=self.delimiter, strict=True)
            names: list[str] | None = None
            before = 0
            for cells in self._cells(reader):
                line, before = before + 1, reader.line_num
                if not cells:
                    continue
                if names is None:
                    names = self._header(line, cells)
                elif len(cells) != len(names):
                    raise DataError(
                        f"{self.name}:{line} has {counted(len(cells), 'cells')}, but the first line names "
                        f"{counted(len(names), 'fields')} "
                        f"({', '.join(names)}); put a cell that holds the delimiter or a line end into double quotes"
                    )
                else:
                    yield line, dict(zip(names, cells, strict=True))

    def _cells(self, reader: Any) -> Iterator[list[str]]:
        while True:
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                other = self._mark_between_quotes() if reader.line_num == 1 else None
                wrong = (
                    f"cells must be delimited by {self.delimiter!r}, not by {other!r}; {self._delimited(other)}"
                    if other
                    else error
                )
                raise DataError(f"{self.name}:{reader.line_num} is not valid CSV: {wrong}") from error
            except UnicodeDecodeError as error:
                raise DataError(self._undecodable(error.reason)) from error
            yield cells

    def _undecodable(self, reason: str) -> str:
        """Name the first line that is not UTF-8, and say how the file becomes it.

        Text is decoded in blocks, before its lines are counted.
        """
        with self.file.opened() as opened:
            for number, line in enumerate(opened, 1):
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as error:
                    wide = number == 1 and line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
                    where = f"byte 0x{line[error.start]:02x} at position {error.start + 1} of the line"
                    remedy = to_utf8(self.name, utf_16=wide)
                    return f"{self.name}:{number} is not UTF-8: {where} ({error.reason}); {remedy}"
        return f"{self.name} is not UTF-8 ({reason}); {to_utf8(self.name)}"

    def _mark_between_quotes(self) -> str | None:
        """Return what delimits the quoted cells of the first line; None where that is not known."""
        with self.file.opened() as opened:
            line = opened.readline().decode("utf-8-sig", "replace")
        return next((mark for mark in _MARKS if f'"{mark}' in line and mark != self.delimiter), None)

    def _delimited(self, mark: str) -> str:
        """Say how a file of another delimiter becomes one that is read."""
        old, new = beside(self.name, ".tsv" if mark == "\t" else "-commas.csv")
        if mark == "\t":
            return f"name the file {new}"
        # Without a blank behind its semicolons: the rest of a message is told from its remedy by one.
        program = (
            "import csv,sys;csv.writer(sys.stdout).writerows("
            f"csv.reader(open(sys.argv[1],encoding='utf-8-sig',newline=''),delimiter='{mark}'))"
        )
        return f'make one of it that is: python3 -X utf8 -c "{program}" {old} > {new}'

    def _header(self, line: int, cells: list[str]) -> list[str]:
        names = [cell.strip() for cell in cells]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise DataError(f"{self.name}:{line} names the field {twice[0]!r} more than once; keep one of them")
        other = next((mark for mark in _MARKS if mark != self.delimiter and len(names) == 1 and mark in names[0]), None)
        if other:
            raise DataError(
                f"{self.name}:{line} names one field, {names[0]!r}; cells must be delimited by {self.delimiter!r}, not by "
                f"{other!r}; {self._delimited(other)}"
            )
        return names
