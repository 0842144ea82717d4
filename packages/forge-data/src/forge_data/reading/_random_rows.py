"""Row numbers of an entry and a seed → the rows of it that are read, chosen at random."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from forge_data._errors import DataError
from forge_data._splitmix import splitmix64
from forge_data._values import counted
from forge_data.reading._csv import CsvFile
from forge_data.reading._dataset_info import DescribedRows
from forge_data.reading._jsonl import JsonLines
from forge_data.reading._record import CHUNK_BYTES, Chunk, ChunkOfChunk, Reader, Record, Refused

if TYPE_CHECKING:
    from numpy.typing import NDArray


@attrs.frozen(eq=False)
class ChosenRows(ChunkOfChunk):
    """Some rows of a chunk; others are passed over, broken ones too."""

    numbers: "NDArray[np.int64]"
    """Numbers of the rows, rising."""

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """Yield the rows; one that cannot be read is passed to `refused`, or raised."""
        chosen = frozenset(self.numbers.tolist())

        def refuse(row: int, error: DataError) -> None:
            if row in chosen:
                if refused is None:
                    raise error
                refused(row, error)

        for record in self.chunk.records(refuse):
            if record.row in chosen:
                yield record


def chosen_of(chunks: Iterator[Chunk], numbers: "NDArray[np.int64]") -> Iterator[Chunk]:
    """Yield the chunks that have one of the rows, restricted to those."""
    for chunk in chunks:
        first, last = np.searchsorted(numbers, [chunk.first_row, chunk.last_row + 1]).tolist()
        if first < last:
            yield ChosenRows(chunk, numbers[first:last])


def choose_rows(path: str, readers: Sequence[Reader], wanted: float, seed: int) -> "list[NDArray[np.int64]]":
    """Choose rows of an entry of one or several files; return the numbers of each file's.

    Row i of all rows has the hash of (seed, i), as samples have that are held out; the smallest hashes are read. So the rows
    are the same on every machine, and those of a smaller number are among those of a larger one.

    Args:
        path: the entry, for messages.
        readers: its files, in order.
        wanted: a share, or from 1 on a number of rows.
        seed: seed of the hashes.

    Raises:
        DataError: there are fewer rows, or the share is of none.
    """
    numbers = [_numbers(reader) for reader in readers]
    bounds = np.cumsum([0, *map(len, numbers)])
    total = int(bounds[-1])
    number = wanted if isinstance(wanted, int) else round(total * wanted)
    if not 1 <= number <= total:
        raise DataError(
            f"random_rows of {path} is {wanted!r}, and it has {counted(total, 'rows')}: give a number of them, or a share that "
            "is of one at least; to see rows more often, give it a weight"
        )
    at = np.sort(np.argsort(splitmix64(total, seed), kind="stable")[:number])
    return [
        each[at[(at >= start) & (at < stop)] - start] for each, start, stop in zip(numbers, bounds, bounds[1:], strict=False)
    ]


def _numbers(reader: Reader) -> "NDArray[np.int64]":
    """List the numbers of a reader's rows; lines may be blank, or name fields."""
    match reader:
        case DescribedRows(reader=inner):
            return _numbers(inner)
        case JsonLines() | CsvFile():
            return np.fromiter(reader.row_numbers(), dtype=np.int64)
        case _:
            count = reader.count()
            if count is None:
                count = max((chunk.last_row for chunk in reader.chunks(CHUNK_BYTES)), default=-1) + reader.indexed
            return np.arange(count, dtype=np.int64) + (not reader.indexed)
