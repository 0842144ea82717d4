"""Arrow record batches → rows, for Parquet, Arrow and saved datasets.

A table has one schema for all its rows, so a field that a row lacks is null in it. Nulls within objects are removed again, at
any depth; what was null before it went into the table is lost, as in every Arrow file.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import attrs

from forge_data._errors import DataError
from forge_data.reading._file import DataFile
from forge_data.reading._record import Record, Refused, place_of, record

if TYPE_CHECKING:
    import pyarrow as pa

_MOST_ROWS = 4096


@attrs.frozen
class TableFile(ABC):
    """Rows of a table in a file, from 1; a subclass reads its record batches."""

    name: str
    file: DataFile
    indexed = False

    def chunks(self, size: int) -> "Iterator[TableRows]":
        """Yield record batches of about `size` bytes.

        Raises:
            DataError: the file is of another type, breaks off, or has two columns of one name.
        """
        import pyarrow as pa

        row = 0
        with self._open() as opened:
            try:
                for chunk in table_chunks(self.name, self._batches(opened, size), size):
                    yield chunk
                    row = chunk.last_row
            except (pa.ArrowException, EOFError, OSError) as error:
                raise DataError(f"{self.name}: unreadable after row {row}: {first_line(error)}") from error

    def count(self) -> int | None:
        """Return None: unknown before the file is read."""
        return None

    def digest(self) -> str:
        """Hash the file: SHA-256 in hex."""
        return self.file.digest()

    @abstractmethod
    def _open(self) -> AbstractContextManager[Any]:
        """Open the file."""

    @abstractmethod
    def _batches(self, opened: Any, size: int) -> "Iterator[pa.RecordBatch]":
        """Read the record batches of the file that `_open` opened."""


@attrs.frozen(eq=False)
class TableRows:
    """Some rows of a table, sent as Arrow and made Python objects where they are used."""

    name: str
    first_row: int
    batch: "pa.RecordBatch"
    indexed: bool = False

    def __reduce__(self) -> "tuple[Callable[..., TableRows], tuple[str, int, bytes, bool]]":
        # As a stream of these rows alone; a pickled slice would contain everything that it was cut from.
        import pyarrow as pa

        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, self.batch.schema) as writer:
            writer.write_batch(self.batch)
        return _received, (self.name, self.first_row, sink.getvalue().to_pybytes(), self.indexed)

    @property
    def size(self) -> int:
        """Bytes of the rows."""
        return int(self.batch.nbytes)

    @property
    def last_row(self) -> int:
        """Number of its last row."""
        return self.first_row + self.batch.num_rows - 1

    def part(self, first: int, last: int) -> "TableRows":
        """Return the rows with the numbers `first` to `last`, of which there is one at least."""
        first, last = max(first, self.first_row), min(last, self.last_row)
        return TableRows(self.name, first, self.batch.slice(first - self.first_row, last - first + 1), self.indexed)

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """Yield the rows; one that cannot be read is passed to `refused`, or raised.

        Raises:
            DataError: a value that is not text, or a date beyond Python's, by place and field.
        """
        size = max(1, self.size // max(1, self.batch.num_rows))
        json_columns = [
            name for name, kind in zip(self.batch.schema.names, self.batch.schema.types, strict=True) if _has_json(kind)
        ]
        for row, value in enumerate(self._values(), start=self.first_row):
            place = self._place(row)
            try:
                if isinstance(value, DataError):
                    raise value
                fields = {
                    name: _plain(item, self.batch.schema.field(name).type) if name in json_columns else without_nulls(item)
                    for name, item in value.items()
                }
                yield record(row, fields, size, place)
            except DataError as error:
                if refused is None:
                    raise
                refused(row, error)

    def _values(self) -> "Iterator[dict[str, Any] | DataError]":
        try:
            yield from self.batch.to_pylist()
        except (ValueError, OverflowError):
            # Text that is not UTF-8, or a date beyond Python's: value by value, to name it.
            for index in range(self.batch.num_rows):
                yield self._row(index)

    def _row(self, index: int) -> "dict[str, Any] | DataError":
        row: dict[str, Any] = {}
        for name in self.batch.schema.names:
            try:
                row[name] = self.batch.column(name)[index].as_py()
            except (ValueError, OverflowError) as fault:
                return DataError(f"{self._place(self.first_row + index)}: field {name} cannot be read: {_reason(fault)}")
        return row

    def _place(self, row: int) -> str:
        return place_of(self.name, row, indexed=self.indexed)


def _received(name: str, first_row: int, stream: bytes, indexed: bool) -> TableRows:
    import pyarrow as pa

    with pa.ipc.open_stream(stream) as opened:
        return TableRows(name, first_row, opened.read_next_batch(), indexed)


def table_chunks(name: str, batches: "Iterator[pa.RecordBatch]", size: int, *, indexed: bool = False) -> Iterator[TableRows]:
    """Cut record batches into pieces of about `size` bytes, with the rows' numbers.

    They count from 1, or from 0 if `indexed`.

    Raises:
        DataError: two columns of one name.
    """
    row = 0 if indexed else 1
    for batch in batches:
        names = batch.schema.names
        if twice := [each for each in dict.fromkeys(names) if names.count(each) > 1]:
            raise DataError(f"{name}: more than one column is called {twice[0]!r}; keep one of them")
        if not batch.num_rows:
            continue
        step = rows_for(size, int(batch.nbytes), batch.num_rows)
        for start in range(0, batch.num_rows, step):
            piece = batch.slice(start, step)
            yield TableRows(name, row + start, piece, indexed)
        row += batch.num_rows


def rows_for(size: int, total: int, rows: int) -> int:
    """Compute how many of `rows`, of `total` bytes together, take about `size` bytes."""
    return max(1, min(_MOST_ROWS, size * rows // max(1, total)))


def without_nulls(value: Any) -> Any:
    """Remove null fields from objects, at any depth; nulls in lists stay."""
    if isinstance(value, dict):
        return {name: without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and value and isinstance(value[0], (dict, list, type(None))):
        return [without_nulls(item) for item in value]
    return value


def first_line(error: BaseException) -> str:
    """Return the first line of an error, without C++ internals."""
    return str(error).split("\n", 1)[0][:200]


def _has_json(kind: "pa.DataType") -> bool:
    """Tell whether a column holds JSON.

    `datasets` keeps it as text within Arrow, so that every row has the fields it had.
    """
    import pyarrow as pa

    if isinstance(kind, pa.JsonType):
        return True
    return any(_has_json(kind.field(index).type) for index in range(kind.num_fields))


def _plain(value: Any, kind: "pa.DataType") -> Any:
    """Decode the JSON in a value; remove nulls from everything else."""
    import pyarrow as pa

    if value is None or not _has_json(kind):
        return without_nulls(value)
    if isinstance(kind, pa.JsonType):
        return json.loads(value)
    if isinstance(value, dict):
        made = ((name, item, kind.field(name).type) for name, item in value.items() if item is not None)
        return {name: _plain(item, inner) for name, item, inner in made}
    if isinstance(value, list):
        return [_plain(item, kind.field(0).type) for item in value]
    return value


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1} ({error.reason})"
    return first_line(error)
