"""Token store → Arrow record batches, for `datasets` and Parquet.

A sample is a row of `input_ids` and `labels`, int32 lists, and of `weights`, float32 lists, where tokens of the store have
some; an unpaired answer has `desirable` too. A preference is one row:
`chosen_input_ids`, `chosen_labels`, `rejected_input_ids`, `rejected_labels`, and `margin` where the rows gave it.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data._errors import StoreError
from forge_data._example import IGNORED
from forge_data._paths import expand_user
from forge_data.store._manifest import PREFERENCE, UNPAIRED, WEIGHTS
from forge_data.store._publish import new_file

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Dataset

_ROWS = 1024
"""Rows of a record batch, and of a row group of Parquet."""


def to_dataset(store: Any) -> "Dataset":
    """Make a `Dataset` of a `TokenStore`."""
    import pyarrow as pa
    from datasets import Dataset

    return Dataset(pa.Table.from_batches(list(_batches(store))), fingerprint=store.fingerprint)


def write_parquet(store: Any, file: str | os.PathLike[str]) -> Path:
    """Write a `TokenStore` as a Parquet file, a row group at a time.

    Raises:
        StoreError: the file cannot be written.
    """
    from pyarrow import parquet

    batches = _batches(store)
    first = next(batches)
    with new_file(file, store.path) as partial, parquet.ParquetWriter(partial, first.schema) as writer:
        writer.write_batch(first)
        for batch in batches:
            writer.write_batch(batch)
    return expand_user(file, StoreError)


def _batches(store: Any) -> "Iterator[pa.RecordBatch]":
    """Make the record batches of a `TokenStore`; an empty one has one without rows."""
    import pyarrow as pa

    if store.kind == PREFERENCE:
        sides, names, margins = store.pairs, ("chosen_", "rejected_"), store.margins
        more: dict[str, Any] = {} if margins is None else {"margin": margins}
    else:
        sides, names = np.arange(len(store))[:, None], ("",)
        more = {"desirable": store.desirable} if store.kind == UNPAIRED else {}
    for first in range(0, max(1, len(sides)), _ROWS):
        columns: dict[str, Any] = {}
        for name, indices in zip(names, sides[first : first + _ROWS].T, strict=True):
            examples = [store[index] for index in indices.tolist()]
            columns[f"{name}input_ids"] = _lists([example.input_ids for example in examples])
            columns[f"{name}labels"] = _lists([example.labels for example in examples])
            if WEIGHTS in store.sha256:
                columns[f"{name}weights"] = _lists([_weights(example) for example in examples], np.float32)
        yield pa.RecordBatch.from_pydict(columns | {name: values[first : first + _ROWS] for name, values in more.items()})


def _weights(example: Any) -> Any:
    return (example.labels != IGNORED).astype(np.float32) if example.weights is None else example.weights


def _lists(arrays: "Sequence[Any]", dtype: Any = np.int32) -> "pa.ListArray":
    import pyarrow as pa

    ends = np.cumsum([0, *map(len, arrays)], dtype=np.int32)
    return pa.ListArray.from_arrays(ends, np.concatenate([np.zeros(0, dtype=dtype), *arrays]))
