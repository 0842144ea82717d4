"""Arrow file, with footer or as a stream → record batches."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, BinaryIO

import attrs

from forge_data.reading._table import TableFile

if TYPE_CHECKING:
    import pyarrow as pa

_MAGIC = b"ARROW1"


@attrs.frozen
class ArrowFile(TableFile):
    """Rows of an Arrow file, from 1."""

    def _open(self) -> AbstractContextManager[BinaryIO]:
        return self.file.opened()

    def _batches(self, opened: BinaryIO, size: int) -> "Iterator[pa.RecordBatch]":  # noqa: ARG002 - batches are as written
        import pyarrow as pa

        has_footer = opened.read(len(_MAGIC)) == _MAGIC
        opened.seek(0)
        source = opened if self.file.local is None else pa.memory_map(str(self.file.local))
        if has_footer:
            with pa.ipc.open_file(source) as reader:
                yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
        else:
            with pa.ipc.open_stream(source) as reader:
                yield from reader
