"""Places in a shuffled order of N samples to the samples there, without making the order: any part of it can be asked for.

Up to `TABLE` samples the order is a table, sorted once and kept. Beyond, it is computed place by place by a keyed
bijection, so a billion samples take the memory of a thousand: a Feistel network that alternates between two halves of
sizes a and b, with a·b just above N, and that is walked again from where it falls on one of the few places beyond N.
Source: Black and Rogaway, Ciphers with arbitrary finite domains, CT-RSA 2002 (generalized Feistel, cycle walking).
"""

from functools import lru_cache
from math import isqrt

import numpy as np
import numpy.typing as npt

from forge_packing._checks import Int64Array

TABLE = 2**16
"""The largest N whose order is a table: 512 KiB."""

_ROUNDS = 8
_UInt64Array = npt.NDArray[np.uint64]


def shuffled(places_P: Int64Array, size: int, *, seed: int, epoch: int, source: int = 0) -> Int64Array:
    """int64[P]: the samples, 0 to size-1, that stand at these places of the order of (size, seed, epoch, source)."""
    if size <= TABLE:
        return _table(size, seed, epoch, source)[places_P]
    return feistel(places_P, size, _raw(_ROUNDS, seed, epoch, source))


def _raw(count: int, seed: int, epoch: int, source: int) -> _UInt64Array:
    """uint64[count] from Philox.

    numpy promises that its raw stream stays as it is on every machine and in every release (NEP 19), and does not promise
    that of a Generator's methods.
    """
    # Four words, as many as SeedSequence mixes alike; trailing zeros change nothing, so [seed, epoch] is source 0.
    words = [seed, epoch % 2**32, source, epoch // 2**32]
    return np.random.Philox(np.random.SeedSequence(words)).random_raw(count)


@lru_cache(maxsize=16)
def _table(size: int, seed: int, epoch: int, source: int) -> Int64Array:
    order = np.argsort(_raw(size, seed, epoch, source), kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def feistel(places_P: Int64Array, size: int, keys: _UInt64Array) -> Int64Array:
    """The keyed bijection of 0 to size-1 at these places: whole numbers alone, so the same on every machine.

    keys: uint64, one a round. Every round adds to one half a number that follows from the other half, which is undone by
    subtracting it: so no two places fall together, whatever the numbers are.
    """
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    walking = np.asarray(places_P).astype(np.uint64)
    found = _rounds(walking, a, b, keys)
    # a·b exceeds size by less than a, so about one place in a walks twice.
    beyond = np.flatnonzero(found >= size)
    while beyond.size:
        found[beyond] = _rounds(found[beyond], a, b, keys)
        beyond = beyond[found[beyond] >= size]
    return found.astype(np.int64)


def _rounds(places_P: _UInt64Array, a: int, b: int, keys: _UInt64Array) -> _UInt64Array:
    sizes = (np.uint64(a), np.uint64(b))
    right, left = np.divmod(places_P, sizes[0])
    halves = [left, right]
    for number, key in enumerate(keys):
        turn = number % 2
        mixed = _mixed(halves[1 - turn] + key)
        mixed %= sizes[turn]
        mixed += halves[turn]
        # Cheaper than a second remainder: the sum is below twice the size.
        mixed -= sizes[turn] * (mixed >= sizes[turn])
        halves[turn] = mixed
    return halves[1] * sizes[0] + halves[0]


def _mixed(x: _UInt64Array) -> _UInt64Array:
    """splitmix64's finalizer (Stafford's mix 13), in place: every bit of the outcome depends on every bit of `x`."""
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
