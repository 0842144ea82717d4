"""Permutation of N samples: places of a shuffled order → the samples there.

Up to `TABLE` samples the order is a table, sorted once and cached. Beyond, it is computed place by place by a keyed
bijection, so a billion samples take the memory of a thousand: a Feistel network that alternates between two halves of
sizes a and b, with a·b just above N, applied again where it gives one of the few places beyond N (cycle walking).
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
    """Return the samples, 0 to size-1, at these places of a shuffled order: int64[P]."""
    if size <= TABLE:
        return _table(size, seed, epoch, source)[places_P]
    return feistel(places_P, size, _raw(_ROUNDS, seed, epoch, source))


def _raw(count: int, seed: int, epoch: int, source: int) -> _UInt64Array:
    """Return the raw stream of Philox: uint64[count].

    numpy promises that its raw stream stays the same on every machine and in every release (NEP 19), and does not promise
    it of a Generator's methods.
    """
    # SeedSequence mixes up to four words alike; trailing zeros change nothing, so [seed, epoch] is source 0.
    words = [seed, epoch % 2**32, source, epoch // 2**32]
    return np.random.Philox(np.random.SeedSequence(words)).random_raw(count)


@lru_cache(maxsize=16)
def _table(size: int, seed: int, epoch: int, source: int) -> Int64Array:
    order = np.argsort(_raw(size, seed, epoch, source), kind="stable").astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


def feistel(places_P: Int64Array, size: int, keys: _UInt64Array) -> Int64Array:
    """Apply the keyed bijection of 0 to size-1, in integers: the same on every machine.

    keys: uint64, one a round. Every round adds to one half a number that follows from the other half, which subtracting it
    undoes: so no two places get the same sample, whatever the keys are.
    """
    a = isqrt(size - 1) + 1
    b = -(-size // a)
    walking = np.asarray(places_P).astype(np.uint64)
    found = _rounds(walking, a, b, keys)
    # a·b exceeds size by less than a, so about one place in a is applied twice.
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
        mixed = _mix(halves[1 - turn] + key)
        mixed %= sizes[turn]
        mixed += halves[turn]
        # Cheaper than a second remainder, as the sum is below twice the size.
        mixed -= sizes[turn] * (mixed >= sizes[turn])
        halves[turn] = mixed
    return halves[1] * sizes[0] + halves[0]


def _mix(x: _UInt64Array) -> _UInt64Array:
    """Mix 64 bits in place by splitmix64's finalizer (Stafford's mix 13).

    Each bit of the result depends on all bits of `x`.
    """
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
