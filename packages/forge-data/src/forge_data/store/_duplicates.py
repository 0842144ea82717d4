"""Samples that a split must keep together: equal tokens, or pieces of one row."""

import hashlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

_DIGEST = np.dtype([("high", "<u8"), ("low", "<u8")])


def digest(examples: Iterable["NDArray[np.int32]"], media: bytes = b"") -> bytes:
    """Hash the ids int32[S] and the images of a unit's samples: 16 bytes, equal for equal ones."""
    hashed = hashlib.blake2b(digest_size=_DIGEST.itemsize)
    for ids in examples:
        # The length before the ids, so that two samples cannot run into one another.
        hashed.update(len(ids).to_bytes(8, "little"))
        hashed.update(np.ascontiguousarray(ids).data)
    hashed.update(media)
    return hashed.digest()


def as_digests(packed: bytearray) -> "NDArray[Any]":
    """Read (uint64, uint64)[U] from what `digest` returned, one after the other."""
    return np.frombuffer(packed, dtype=_DIGEST)


def grouped(digests: "NDArray[Any]", rows: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """Name, for each unit, the first unit of its group: int64[U].

    Units of the same tokens or of one row are in one group, directly or over other units.

    Args:
        digests: a hash of each unit's ids.
        rows: int64[U], a number for the row that each unit came from.
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
