"""A Parquet file to its record batches; pyarrow, which `datasets` reads it with too, keeps one in memory and no more."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from forge_data._errors import DataError
from forge_data.reading._file import DataFile
from forge_data.reading._table import TableRows, first_line, rows_for, table_chunks

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet


@attrs.frozen
class ParquetFile:
    """Rows of a Parquet file, from 1."""

    name: str
    file: DataFile
    indexed = False

    def chunks(self, size: int) -> Iterator[TableRows]:
        """Record batches of about `size` bytes.

        Raises:
            DataError: the file is not Parquet, breaks off, or has two columns of one name.
        """
        import pyarrow as pa

        with self._open() as opened:
            row = 0
            try:
                for chunk in table_chunks(self.name, self._batches(opened, size), size):
                    yield chunk
                    row = chunk.last_row
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.name}: unreadable after row {row}: {first_line(error)}") from error

    def count(self) -> int | None:
        """Rows in the file, from its footer."""
        with self._open() as opened:
            return opened.metadata.num_rows

    def digest(self) -> str:
        """SHA-256 in hex of the file."""
        return self.file.digest()

    def _batches(self, opened: "parquet.ParquetFile", size: int) -> "Iterator[pa.RecordBatch]":
        groups = [opened.metadata.row_group(index) for index in range(opened.metadata.num_row_groups)]
        total = sum(group.total_byte_size for group in groups)
        return opened.iter_batches(batch_size=rows_for(size, total, opened.metadata.num_rows))

    @contextmanager
    def _open(self) -> "Iterator[parquet.ParquetFile]":
        import pyarrow as pa
        from pyarrow import parquet

        with self.file.opened() as raw:
            try:
                opened = parquet.ParquetFile(raw if self.file.local is None else self.file.local, memory_map=True)
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.file.path} is not a Parquet file that can be read: {first_line(error)}") from error
            with opened:
                yield opened
