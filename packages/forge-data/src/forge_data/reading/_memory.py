"""Rows in memory → chunks: of a `datasets.Dataset`, a list of dicts, any iterable of dicts.

A list or a `Dataset` is hashed before it is read. A stream (a generator, an `IterableDataset`) is read once, a chunk at a time,
and hashed meanwhile.
"""

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from datetime import date, time
from os import PathLike
from typing import Any, Self

import attrs

from forge_data._errors import DataError
from forge_data._media_values import is_pil_image
from forge_data._own_reading import names_data_sets
from forge_data.reading._huggingface import DatasetSplit
from forge_data.reading._json import value_chunks
from forge_data.reading._record import Chunk
from forge_data.reading._table import without_nulls

_SCALARS = frozenset({str, int, float, bool, type(None)})
_TABLES = {
    ("pandas", "DataFrame"): 'df.to_dict("records"), or datasets.Dataset.from_pandas(df), which reads missing cells as null',
    ("polars", "DataFrame"): "df.to_dicts()",
    ("polars", "LazyFrame"): "df.collect().to_dicts()",
    ("pyarrow", "Table"): "table.to_pylist(), or datasets.Dataset(table)",
}
"""Tables of other libraries, which are not indexed by row: (package, class) → what makes rows of `df` or `table`."""


@attrs.define(eq=False)
class InMemoryRows:
    """Rows that are given as objects, which messages name `data_path[17]`, from 0.

    `prepare`, `prepare_prompts` and `lint` make one of what they are given; `of` makes one for a caller that wants its
    description.
    """

    name: str
    """Name of the argument, for messages."""
    rows: Any
    """The rows as they were given."""
    kind: str
    """What they are, such as `datasets.Dataset`."""
    indexed = True
    _table: DatasetSplit | None = None
    """The same rows as a table; None where they are read one by one."""
    _is_stream: bool = attrs.field(default=False, alias="is_stream")
    _was_read: bool = False
    """Whether all of them were read, after which their number and hash are known."""
    _count: int | None = None
    _sha256: str | None = None

    @classmethod
    def of(cls, value: Any, name: str = "data_path") -> "Self | None":
        """Make one of a value for `data_path`; None for paths.

        Raises:
            DataError: a dictionary of data sets, of which one is meant; a table of another library.
        """
        if isinstance(value, cls):
            return value
        if isinstance(value, (str, bytes, PathLike)) or value is None:
            return None
        datasets: Any = sys.modules.get("datasets")
        if isinstance(value, Mapping):
            if datasets is not None and isinstance(value, (datasets.DatasetDict, datasets.IterableDatasetDict)):
                raise DataError(f"`{name}` is a {type(value).__name__} of {', '.join(map(str, value))}; give one of them")
            return None
        if datasets is not None and isinstance(value, datasets.Dataset):
            # A transform of the user's makes rows that the table does not hold.
            own = value.format["type"] == "custom"
            return cls(name, value, "datasets.Dataset", None if own else DatasetSplit(name, value, indexed=True))
        if datasets is not None and isinstance(value, datasets.IterableDataset):
            return cls(name, value, "datasets.IterableDataset", is_stream=True)
        check_no_table(value, name)
        if hasattr(value, "__len__") and hasattr(value, "__getitem__"):
            holds_rows = not isinstance(value, (list, tuple)) or (
                len(value) > 0 and isinstance(value[0], Mapping) and not names_data_sets(value)
            )
            return cls(name, value, type(value).__name__) if holds_rows else None
        return cls(name, value, type(value).__name__, is_stream=True) if isinstance(value, Iterable) else None

    @property
    def is_stream(self) -> bool:
        """Whether they are read once, and not known beforehand."""
        return self._is_stream

    @property
    def description(self) -> str:
        """Kind, number and hash of the rows: `list of 1,200 rows, sha256 0f3a...`.

        Of a stream number and hash are known once it was read.
        """
        self.digest()
        counted = f"{self.kind} in memory" if self._count is None else f"{self.kind} of {self._count:,} rows"
        return f"{counted}, sha256 {self._sha256[:16]}" if self._sha256 else counted

    def chunks(self, size: int) -> Iterator[Chunk]:
        """Yield rows as they are given, about `size` bytes at a time.

        Raises:
            DataError: a stream that was read already, or that raises an error.
        """
        if self._table is not None:
            yield from self._table.chunks(size)
            return
        if self._is_stream and self._was_read and iter(self.rows) is self.rows:
            raise DataError(f"`{self.name}` is a {self.kind}, which was read already; make it again, or give a list")
        yield from value_chunks(self.name, self._hashed(), size)

    def count(self) -> int | None:
        """Return the number of rows; None for a stream."""
        return None if self._is_stream else len(self.rows)

    def digest(self) -> str | None:
        """Hash the rows: SHA-256 in hex; None for a stream, and for values without known content."""
        if self._is_stream:
            return None
        if self._table is not None and not self._was_read:
            self._was_read, self._count, self._sha256 = True, len(self.rows), self._table.digest()
        elif not self._was_read:
            for _ in self._hashed():
                pass
        return self._sha256

    def _hashed(self) -> Iterator[tuple[int, object, int]]:
        """Yield (index, row, bytes) of each; after the last one their number and hash are known."""
        digest, known, count, contents = hashlib.sha256(), True, 0, _Contents()
        for row, value in enumerate(self._given()):
            try:
                plain = plain_values(value)
            except RecursionError as error:
                raise DataError(f"{self.name}[{row}] is nested too deeply to be read") from error
            if self.kind.startswith("datasets."):
                plain = without_nulls(plain)
            try:
                text = json.dumps(plain, separators=(",", ":"), default=contents).encode()
            except (TypeError, ValueError, RecursionError):
                known, text = False, repr(plain).encode("utf-8", "replace")
            digest.update(len(text).to_bytes(8, "little") + text)
            count = row + 1
            yield row, plain, len(text) + contents.size
            contents.size = 0
        self._was_read, self._count, self._sha256 = True, count, digest.hexdigest() if known else None

    def _given(self) -> Iterator[object]:
        # By index where there is one: a data set of torch is iterated until an error that it need not raise.
        given = iter(self.rows) if self._is_stream else (self.rows[index] for index in range(len(self.rows)))
        row = 0
        while True:
            try:
                value = next(given)
            except StopIteration:
                return
            except Exception as error:
                raise DataError(f"{self.name}[{row}] cannot be read: {type(error).__name__}: {error}") from error
            yield value
            row += 1


def check_no_table(value: object, name: str = "data_path") -> None:
    """Refuse a table of another library, by its name: none is imported.

    Raises:
        DataError: with the call that makes rows of it.
    """
    for kind in type(value).__mro__:
        package = kind.__module__.partition(".")[0]
        if rows := _TABLES.get((package, kind.__name__)):
            raise DataError(f"`{name}` is a {kind.__name__} of {package}, which is not read as rows; give {rows}")


def plain_values(value: Any) -> Any:
    """Make lists and dicts, as a file has them, of sequences, mappings and arrays at any depth."""
    if type(value) in _SCALARS:
        return value
    if isinstance(value, Mapping):
        return {name: plain_values(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_values(item) for item in value]
    # Arrays and numbers of numpy, torch and jax.
    return plain_values(value.tolist()) if hasattr(value, "tolist") else value


class _Contents:
    """What stands in JSON for values that are none, and the bytes that they hold."""

    def __init__(self) -> None:
        self.size = 0

    def __call__(self, value: object) -> object:
        match value:
            case date() | time():
                return value.isoformat()
            case bytes() | bytearray():
                self.size += len(value)
                return hashlib.sha256(value).hexdigest()
            case _ if is_pil_image(value):
                medium: Any = value
                try:
                    pixels = medium.tobytes()
                except Exception as error:
                    # A broken file, which Pillow reads only now: its format names the field.
                    raise TypeError(type(value).__name__) from error
                self.size += len(pixels)
                more = repr(medium.info.get("transparency")), medium.getexif().tobytes().hex()
                return [medium.mode, medium.size, medium.getpalette(), more, hashlib.sha256(pixels).hexdigest()]
            case _:
                raise TypeError(type(value).__name__)
