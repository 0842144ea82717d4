"""A dataset that `datasets` saved, or that it fetches from the Hub, to its record batches; it is memory-mapped, whatever its size."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from forge_data._errors import DataError
from forge_data.reading._table import TableRows, first_line, table_chunks

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_ROWS = 1000
_SAVED = ("dataset_dict.json", "state.json")
_ON_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?:(?P<split>[\w.-]+(\[[^\]]*\])?)")
"""`org/name:split` or `org/name:config:split`."""


@attrs.frozen(eq=False)
class DatasetSplit:
    """Rows of one split, from 1."""

    name: str
    rows: "Dataset"
    indexed = False

    def chunks(self, size: int) -> Iterator[TableRows]:
        """Record batches of about `size` bytes."""
        return table_chunks(self.name, self._batches(), size)

    def count(self) -> int | None:
        """Rows in the split."""
        return int(self.rows.num_rows)

    def digest(self) -> str:
        """SHA-256 in hex of the schema and of every batch."""
        digest = hashlib.sha256(repr(self.rows.features).encode())
        for batch in self._batches():
            digest.update(batch.serialize())
        return digest.hexdigest()

    def _batches(self) -> "Iterator[pa.RecordBatch]":
        # Typed for every format that there is; in this one it gives tables.
        for table in cast("Iterator[pa.Table]", self.rows.with_format("arrow").iter(batch_size=_ROWS)):
            yield from table.combine_chunks().to_batches()


def is_saved(directory: Path) -> bool:
    """Whether `Dataset.save_to_disk` made a directory."""
    return any((directory / name).is_file() for name in _SAVED)


def open_saved(directory: Path, split: str | None) -> DatasetSplit:
    """A dataset that was saved with `save_to_disk`.

    Raises:
        DataError: it cannot be read, or holds other splits, or several of which none is said.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        loaded: Any = load_from_disk(str(directory))
    except Exception as error:
        raise DataError(f"{directory} is no saved dataset that can be read: {first_line(error)}") from error
    if not isinstance(loaded, DatasetDict):
        if split is not None and split != str(loaded.split):
            raise DataError(f"{directory} is one dataset without splits; give it as {directory.name}, without {split!r}")
        return DatasetSplit(directory.name, loaded)
    names = [str(name) for name in loaded]
    if split is None and len(names) == 1:
        split = names[0]
    if split not in names:
        found = "no split was said" if split is None else f"there is no {split!r}"
        raise DataError(f"{directory} holds the splits {', '.join(names)}, and {found}; give {directory}:{names[0]}")
    return DatasetSplit(f"{directory.name}:{split}", loaded[split])


def names_hub(entry: str) -> bool:
    """Whether a path that is none names a split of a dataset on the Hub."""
    return _ON_HUB.fullmatch(entry) is not None


def open_hub(entry: str) -> DatasetSplit:
    """A split of a dataset on the Hub, which `datasets` fetches, or has already.

    Raises:
        DataError: there is none, it cannot be reached, or it comes as code.
    """
    from datasets import load_dataset

    said = _ON_HUB.fullmatch(entry)
    assert said is not None
    try:
        loaded: Any = load_dataset(said["name"], said["config"], split=said["split"])
    except Exception as error:
        raise DataError(
            f"{entry} is no file here, and as a dataset on the Hub (name:split) it cannot be had: "
            f"{type(error).__name__}: {first_line(error)}; check the name, or the path"
        ) from error
    return DatasetSplit(entry, loaded)
