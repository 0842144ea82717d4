"""What passes from a file to the pipeline: records, and the chunks that carry them to whoever reads them."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from forge_data._errors import DataError
from forge_data._values import describe

CHUNK_BYTES = 1 << 20
"""What a chunk holds, roughly; where one ends depends on the file alone, never on how many workers read it."""


class Record(NamedTuple):
    """One row as it was read."""

    row: int
    """What to look up in the file: the line of a JSONL or CSV file (from 1, blank lines counted), the row of a table (from 1),
    the index in a JSON array (from 0)."""

    fields: dict[str, Any]
    """What the row holds; a field that is null counts as absent."""

    size: int
    """Bytes it took in the file, roughly; batches are cut by it so that memory stays bounded."""

    place: str
    """Where it stands, for a message: `train.jsonl:417`, `train.json[416]`."""


Refused = Callable[[int, DataError], None]
"""What is called with a row that cannot be read (its number, and why) by those who go on past it."""


class Chunk(Protocol):
    """Some rows of one source, in order.

    It pickles; of a plain local JSONL file it is an offset and a size, so that whoever reads it reads its own range of the file.
    """

    @property
    def size(self) -> int:
        """Bytes, roughly."""
        ...

    @property
    def last_row(self) -> int:
        """The number of its last row, for a progress bar."""
        ...

    def records(self, refused: Refused | None = None) -> Iterator[Record]:
        """The rows. A row that cannot be read is told to `refused`, or raised where there is none.

        Raises:
            DataError: a row that is broken or no object, by its place.
        """
        ...


def place_of(name: str, row: int, *, indexed: bool) -> str:
    """Where a row stands, for a message.

    >>> place_of("train.jsonl", 417, indexed=False), place_of("train.json", 0, indexed=True)
    ('train.jsonl:417', 'train.json[0]')
    """
    return f"{name}[{row}]" if indexed else f"{name}:{row}"


def record(row: int, value: object, size: int, place: str) -> Record:
    """A value that was read as a record.

    Raises:
        DataError: it is no object.
    """
    if not isinstance(value, dict):
        raise DataError(f'{place} is not an object but {describe(value)}; a row is an object, such as {{"messages": [...]}}')
    return Record(row, {name: field for name, field in value.items() if field is not None}, size, place)
