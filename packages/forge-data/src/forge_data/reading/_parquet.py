"""Parquet file → record batches; pyarrow, which `datasets` uses too, keeps one in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from forge_data._errors import DataError
from forge_data.reading._table import TableFile, first_line, rows_for

if TYPE_CHECKING:
    import pyarrow as pa
    from pyarrow import parquet


@attrs.frozen
class ParquetFile(TableFile):
    """Rows of a Parquet file, from 1."""

    def count(self) -> int | None:
        """Return the number of rows, from the file's footer."""
        with self._open() as opened:
            return opened.metadata.num_rows

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
