"""An Arrow file, with footer or as a stream, to its record batches."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, BinaryIO

import attrs

from forge_data._errors import DataError
from forge_data.reading._file import DataFile
from forge_data.reading._table import TableRows, first_line, table_chunks

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"


@attrs.frozen
class ArrowFile:
    """Rows of an Arrow file, from 1."""

    name: str
    file: DataFile
    indexed = False

    def chunks(self, size: int) -> Iterator[TableRows]:
        """Record batches of about `size` bytes.

        Raises:
            DataError: the file is not Arrow, breaks off, or has two columns of one name.
        """
        import pyarrow as pa

        row = 0
        with self.file.opened() as raw:
            try:
                for chunk in table_chunks(self.name, self._batches(raw), size):
                    yield chunk
                    row = chunk.last_row
            except (pa.ArrowException, EOFError, OSError) as error:
                raise DataError(f"{self.name}: no Arrow file that can be read behind row {row}: {first_line(error)}") from error

    def count(self) -> int | None:
        """Not known before it was read."""
        return None

    def digest(self) -> str:
        """SHA-256 in hex of the file."""
        return self.file.digest()

    def _batches(self, raw: BinaryIO) -> "Iterator[pa.RecordBatch]":
        import pyarrow as pa

        framed = raw.read(len(_MAGIC)) == _MAGIC
        raw.seek(0)
        source = raw if self.file.local is None else pa.memory_map(str(self.file.local))
        if framed:
            with pa.ipc.open_file(source) as opened:
                yield from (opened.get_batch(index) for index in range(opened.num_record_batches))
        else:
            with pa.ipc.open_stream(source) as opened:
                yield from opened
