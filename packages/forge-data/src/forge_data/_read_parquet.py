"""A Parquet file to its rows, a record batch at a time."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from forge_data._errors import DataError

if TYPE_CHECKING:
    from pyarrow import parquet

_BATCH = 256


@attrs.frozen
class ParquetFile:
    """Rows of a Parquet file; read with pyarrow, which keeps a record batch in memory and no more."""

    path: Path

    def rows(self) -> Iterator[tuple[int, object, int]]:
        """(row, value, bytes) of every row, 1-based.

        Raises:
            DataError: the file is not Parquet, or breaks off.
        """
        import pyarrow as pa

        row = 0
        with self._open() as file:
            try:
                for batch in file.iter_batches(batch_size=_BATCH):
                    size = max(1, batch.nbytes // max(1, batch.num_rows))
                    for value in batch.to_pylist():
                        row += 1
                        yield row, value, size
            except (pa.ArrowException, OSError) as error:
                raise DataError(f"{self.path.name}: unreadable after row {row}: {_first_line(error)}") from error

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


def _first_line(error: BaseException) -> str:
    return str(error).split("\n", 1)[0][:200]
