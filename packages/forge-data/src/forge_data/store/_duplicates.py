"""Samples that must not be parted by a split: of the same tokens, or pieces of one row."""

from typing import TYPE_CHECKING, Any

import numpy as np

from forge_data.linting._sample_table import SampleTable

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from forge_data.store._token_store import TokenStore


def twins_of(store: "TokenStore") -> "NDArray[np.int64]":
    """int64[U]: for each unit of a store (a sample, or a preference) the first that it must not be parted from."""
    table = SampleTable.of(store)
    return twins(table.digests, store._rows()[table.firsts])


def twins(digests: "NDArray[Any]", rows: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """int64[U]: for each unit the first one that has the same tokens or comes from the same row, be it over others.

    digests: a hash of each unit's ids. rows: int64[U], a number for the row that it came from.
    """
    groups = np.arange(len(rows), dtype=np.int64)
    links = [np.unique(keys, return_inverse=True)[1] for keys in (digests, rows)]
    while True:
        before = groups
        for link in links:
            firsts = np.full(len(groups), len(groups), dtype=np.int64)
            np.minimum.at(firsts, link, groups)
            groups = firsts[link]
        if np.array_equal(groups, before):
            return groups
