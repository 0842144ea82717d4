"""Deterministic train/validation split, and pairing of preference samples."""

from typing import TYPE_CHECKING

import numpy as np

from forge_data._errors import DataError, StoreError
from forge_data._splitmix import splitmix64

if TYPE_CHECKING:
    from numpy.typing import NDArray


def split_indices(groups: "NDArray[np.int64]", part: float, seed: int) -> tuple["NDArray[np.int64]", "NDArray[np.int64]"]:
    """Choose samples to hold out: (kept, held out), both int64 and rising.

    About `round(count * part)`, or `part` itself where it is a whole number, are held out, and whole groups only. Each group
    gets a hash of (seed, its first sample), and the smallest hashes are held out. A library's shuffle may change from release
    to release; this does not, so a held-out set stays unseen.

    Args:
        groups: int64[N], for each sample the first one of its group; a sample that is alone names itself.
        part: share to hold out, between 0 and 1, or a whole number of samples.
        seed: seed of the hashes.

    Raises:
        DataError: a share that is not between 0 and 1, or a number below 1.
    """
    is_number = isinstance(part, int) and not isinstance(part, bool)
    if not (part >= 1 if is_number else 0 < part < 1):
        raise DataError(f"what is held out must be a share between 0 and 1, or a whole number of samples, got {part!r}")
    count = len(groups)
    wanted = part if is_number else round(count * part)
    order = np.lexsort((groups, splitmix64(count, seed)[groups]))
    ordered = groups[order]
    borders = np.concatenate(([0], np.flatnonzero(ordered[1:] != ordered[:-1]) + 1, [count]))
    # The border nearest to what is wanted; of two, the one that holds out more.
    held_out = int(borders[np.lexsort((-borders, np.abs(borders - min(wanted, count))))[0]])
    return np.sort(order[held_out:]).astype(np.int64), np.sort(order[:held_out]).astype(np.int64)


def pairs_of(indices: "NDArray[np.int64]") -> "NDArray[np.int64]":
    """Find both sides of each pair among indices of a store in which 2j and 2j + 1 are pair j.

    Returns:
        int64[P, 2], places in `indices`.

    Raises:
        StoreError: one side is there without the other.
    """
    places = np.argsort(indices, kind="stable")
    sides = indices[places]
    if len(sides) % 2 or np.any(sides[::2] % 2) or np.any(sides[::2] + 1 != sides[1::2]):
        raise StoreError("this view holds one side of a preference without the other; select samples by store.pairs")
    pairs = places.reshape(-1, 2).astype(np.int64)
    return pairs[np.argsort(pairs[:, 0], kind="stable")]
