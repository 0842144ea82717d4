"""Seed and places → hashes that are the same on every machine and in every release."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def splitmix64(count: int, seed: int) -> "NDArray[np.uint64]":
    """Compute SplitMix64 (Steele, Lea, Flood 2014) at `count` places of the stream of a seed."""
    golden = 0x9E3779B97F4A7C15
    start = np.uint64((seed * 0xD1342543DE82EF95 + golden) % 2**64)
    state = start + np.arange(count, dtype=np.uint64) * np.uint64(golden)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
