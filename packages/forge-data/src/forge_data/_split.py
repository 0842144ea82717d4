"""A number of samples and a share to the ones that are held out."""

from typing import TYPE_CHECKING

import numpy as np

from forge_data._errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def split_indices(count: int, fraction: float, seed: int) -> tuple["NDArray[np.int64]", "NDArray[np.int64]"]:
    """(kept, held out), both int64 and rising; `round(count * fraction)` are held out.

    Each index gets a hash of (seed, index) and the smallest hashes are held out. A library's shuffle may change from
    release to release; this does not, so a held-out set stays unseen.

    Raises:
        DataError: a share that is not between 0 and 1.
    """
    if not 0 < fraction < 1:
        raise DataError(f"a held-out share must lie between 0 and 1, got {fraction!r}")
    order = np.argsort(_mixed(count, seed), kind="stable")
    held_out = round(count * fraction)
    return np.sort(order[held_out:]).astype(np.int64), np.sort(order[:held_out]).astype(np.int64)


def _mixed(count: int, seed: int) -> "NDArray[np.uint64]":
    """SplitMix64's output function (Steele, Lea, Flood 2014) at `count` places of the stream that the seed begins."""
    golden = 0x9E3779B97F4A7C15
    start = np.uint64((seed * 0xD1342543DE82EF95 + golden) % 2**64)
    state = start + np.arange(count, dtype=np.uint64) * np.uint64(golden)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
