"""Types that pass from a file to the pipeline: records, and chunks of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, Self

import attrs

from forge_data._errors import DataError
from forge_data._values import describe

CHUNK_BYTES = 1 << 20
"""Approximate size of a chunk; where one ends depends on the file alone, never on the number of workers."""


class WithoutNulls(dict[str, Any]):
    """Fields of a row without those that are null, whose names it keeps for messages."""

    def __init__(self, fields: Iterable[tuple[str, Any]] | Mapping[str, Any] = (), nulls: Iterable[str] = ()) -> None:
        super().__init__(fields)
        self.nulls = frozenset(nulls)


class Record(NamedTuple):
    """One row as it was read."""

    row: int
    """Number to look up in the file: line of JSONL or CSV (from 1), row of a table (from 1), index in a JSON array (from 0)."""

    fields: dict[str, Any]
    """Fields of the row; one that is null counts as absent."""

    size: int
    """Approximate bytes in the file; batches are cut by it so that memory stays bounded."""

    place: str
    """Place for messages: `train.jsonl:417`, `train.json[416]`."""


Refused = Callable[[int, DataError], None]
"""Called with a row that cannot be read (its number, and why) by readers that continue after it."""


class Chunk(Protocol):
    """Some rows of one source, in order.

    It pickles; of a plain local JSONL file it is an offset and a size, so that each worker reads its own part of the file.
    """

    @property
    def size(self) -> int:
        """Approximate bytes."""
        ...

    @property
    def first_row(self) -> int:
        """Number of its first row."""
        ...

    @property
    def last_row(self) -> int:
        """Number of its last row."""
        ...

    def part(self, first: int, last: int) -> "Chunk":
        """Return the rows with the numbers `first` to `last`, of which the chunk has one at least."""
        ...

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """Yield the rows; one that cannot be read is passed to `refused`, or raised without it.

        Raises:
            DataError: a row that is broken or not an object, by its place.
        """
        ...


@attrs.frozen(eq=False)
class ChunkOfChunk:
    """Rows of another chunk, which a subclass gives otherwise: some of them, or other fields."""

    chunk: Chunk

    @property
    def size(self) -> int:
        """Approximate bytes, of the whole chunk."""
        return self.chunk.size

    @property
    def first_row(self) -> int:
        """Number of the chunk's first row."""
        return self.chunk.first_row

    @property
    def last_row(self) -> int:
        """Number of the chunk's last row."""
        return self.chunk.last_row

    def part(self, first: int, last: int) -> Self:
        """Return those of the rows with the numbers `first` to `last`."""
        return attrs.evolve(self, chunk=self.chunk.part(first, last))


class Reader(Protocol):
    """Reader of one type of file."""

    @property
    def indexed(self) -> bool:
        """Whether rows are named `file[index]` and not `file:row`."""
        ...

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield the file in chunks of about `size` bytes."""
        ...

    def count(self) -> int | None:
        """Return the number of the last row, for progress; None if that needs a slow pass."""
        ...

    def digest(self) -> str | None:
        """Hash the content: SHA-256 in hex; None where it is read only once."""
        ...


def place_of(name: str, row: int, *, indexed: bool) -> str:
    """Name the place of a row, for a message.

    >>> place_of("train.jsonl", 417, indexed=False), place_of("train.json", 0, indexed=True)
    ('train.jsonl:417', 'train.json[0]')
    """
    return f"{name}[{row}]" if indexed else f"{name}:{row}"


def record(row: int, value: object, size: int, place: str) -> Record:
    """Make a record of a value that was read.

    Raises:
        DataError: it is not an object.
    """
    if not isinstance(value, dict):
        raise DataError(f'{place} is not an object but {describe(value)}; a row is an object, such as {{"messages": [...]}}')
    given = {name: field for name, field in value.items() if field is not None}
    return Record(row, given if len(given) == len(value) else WithoutNulls(given, value.keys() - given.keys()), size, place)
