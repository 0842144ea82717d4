"""A Parquet file to its rows, a record batch at a time."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from forge_data._errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet

_BATCH = 256


@attrs.frozen
class ParquetFile:
    """Rows of a Parquet file; read with pyarrow, which keeps a record batch in memory and no more."""

    path: Path

    def rows(self) -> Iterator[tuple[int, object, int]]:
        """(row, value, bytes) of every row, 1-based.

        Raises:
            DataError: the file is not Parquet, breaks off, has two columns of one name, or a value that cannot be read.
        """
        import pyarrow as pa

        row = 0
        with self._open() as file:
            names = file.schema_arrow.names
            if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
                raise DataError(f"{self.path.name}: more than one column is called {twice[0]!r}; keep one of them")
            try:
                for batch in file.iter_batches(batch_size=_BATCH):
                    size = max(1, batch.nbytes // max(1, batch.num_rows))
                    for value in self._values(batch, row):
                        row += 1
                        yield row, value, size
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.path.name}: unreadable after row {row}: {_first_line(error)}") from error

    def _values(self, batch: "pa.RecordBatch", before: int) -> list[dict[str, Any]]:
        try:
            return batch.to_pylist()
        except (ValueError, OverflowError) as error:
            # Text that is not UTF-8, a date beyond what Python has: looked for again, value by value, to name it.
            for index, name in itertools.product(range(batch.num_rows), batch.schema.names):
                try:
                    batch.column(name)[index].as_py()
                except (ValueError, OverflowError) as fault:
                    place = f"{self.path.name}:{before + index + 1}"
                    raise DataError(f"{place}: field {name} cannot be read: {_reason(fault)}") from fault
            last = before + batch.num_rows
            raise DataError(f"{self.path.name}: a row of {before + 1} to {last} cannot be read: {_reason(error)}") from error

    def count(self) -> int:
        """Rows in the file, from its footer."""
        with self._open() as file:
            return file.metadata.num_rows

    def _open(self) -> "parquet.ParquetFile":
        import pyarrow as pa
        from pyarrow import parquet

        try:
            return parquet.ParquetFile(self.path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{self.path} is not a Parquet file that can be read: {_first_line(error)}") from error


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x} at position {error.start + 1} ({error.reason})"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:200]
