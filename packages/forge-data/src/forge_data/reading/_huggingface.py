"""Dataset that `datasets` saved, or fetches from the Hub → record batches, memory-mapped."""

import hashlib
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from forge_data._errors import DataError, printable
from forge_data.reading._table import TableRows, first_line, table_chunks

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_ROWS = 1000
_SECONDS = 5.0
"""How long the Hub may take to say whether it has a dataset."""
_SAVED = ("dataset_dict.json", "state.json")
_ON_HUB = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<config>[\w.-]+))?:(?P<split>[\w.-]+(\[[^\]]*\])?)")
"""`org/name:split` or `org/name:config:split`."""


@attrs.frozen(eq=False)
class DatasetSplit:
    """Rows of one split, from 1, or of a `Dataset` in memory."""

    name: str = attrs.field(converter=printable)
    rows: "Dataset"
    indexed: bool = False
    """Whether rows are named `data_path[416]`, from 0."""

    def chunks(self, size: int) -> Iterator[TableRows]:
        """Yield record batches of about `size` bytes."""
        return table_chunks(self.name, self._batches(), size, indexed=self.indexed)

    def count(self) -> int | None:
        """Return the number of rows in the split."""
        return int(self.rows.num_rows)

    def digest(self) -> str:
        """Hash the schema and every batch: SHA-256 in hex."""
        digest = hashlib.sha256(repr(self.rows.features).encode())
        for batch in self._batches():
            digest.update(batch.serialize())
        return digest.hexdigest()

    def _batches(self) -> "Iterator[pa.RecordBatch]":
        # Typed for every format of datasets; in this one it yields tables.
        for table in cast("Iterator[pa.Table]", self.rows.with_format("arrow").iter(batch_size=_ROWS)):
            yield from table.combine_chunks().to_batches()


def is_saved(directory: Path) -> bool:
    """Tell whether `Dataset.save_to_disk` made a directory."""
    return any((directory / name).is_file() for name in _SAVED)


def open_saved(directory: Path, split: str | None) -> DatasetSplit:
    """Open a dataset that was saved with `save_to_disk`.

    Raises:
        DataError: it cannot be read, or holds other splits, or several of which none is named.
    """
    from datasets import DatasetDict, load_from_disk

    try:
        loaded: Any = load_from_disk(str(directory))
    except Exception as error:
        raise DataError(f"{directory} is not a saved dataset that can be read: {first_line(error)}") from error
    if not isinstance(loaded, DatasetDict):
        if split is not None and split != str(loaded.split):
            raise DataError(f"{directory} is one dataset without splits; give it as {directory.name}, without {split!r}")
        return DatasetSplit(directory.name, loaded)
    names = [str(name) for name in loaded]
    if split is None and len(names) == 1:
        split = names[0]
    if split not in names:
        found = "no split was named" if split is None else f"there is no {split!r}"
        raise DataError(f"{directory} holds the splits {', '.join(names)}, and {found}; give {directory}:{names[0]}")
    return DatasetSplit(f"{directory.name}:{split}", loaded[split])


def is_hub_name(entry: str) -> bool:
    """Tell whether a string that is not a path names a split of a dataset on the Hub."""
    return _ON_HUB.fullmatch(entry) is not None


def open_hub(entry: str) -> DatasetSplit:
    """Open a split of a dataset on the Hub, which `datasets` fetches or has cached.

    Raises:
        DataError: it does not exist, cannot be reached, or comes as code.
    """
    from datasets import load_dataset

    parts = _ON_HUB.fullmatch(entry)
    assert parts is not None
    unreachable = _unreachable(parts["name"], _SECONDS)
    if unreachable:
        raise DataError(
            f"{entry} is no file here, and the Hugging Face Hub, which may have it as a dataset (name:split), cannot be asked: "
            f"{unreachable}; check the name, or try again once the network is there (HTTPS_PROXY for a proxy, HF_ENDPOINT for "
            "a mirror)"
        )
    try:
        loaded: Any = load_dataset(parts["name"], parts["config"], split=parts["split"])
    except Exception as error:
        raise DataError(
            f"{entry} is no file here, and as a dataset on the Hub (name:split) it cannot be loaded: "
            f"{type(error).__name__}: {first_line(error)}; check the name, or the path"
        ) from error
    return DatasetSplit(entry, loaded)


def _unreachable(name: str, seconds: float) -> str:
    """Say why the Hub does not answer; "" where it does, or the dataset is in the cache.

    `datasets` by itself tries half a minute where there is no network.
    """
    from datasets import config
    from datasets.naming import camelcase_to_snakecase
    from huggingface_hub import HfApi, is_offline_mode
    from huggingface_hub.errors import HfHubHTTPError

    owner, _, own = name.partition("/")
    if is_offline_mode() or Path(config.HF_DATASETS_CACHE, f"{owner}___{camelcase_to_snakecase(own)}").exists():
        return ""
    answers: list[str] = []

    def ask() -> None:
        try:
            HfApi().dataset_info(name, timeout=seconds)
        except HfHubHTTPError:
            answers.append("")  # an answer: `datasets` says what it means
        except Exception as error:  # noqa: BLE001 - whatever the client and its libraries raise without a network
            answers.append(first_line(error) or type(error).__name__)
        else:
            answers.append("")

    # Looking up a host's address has no time limit of its own.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(seconds)
    return answers[0] if answers else f"no answer within {seconds:g} s"
