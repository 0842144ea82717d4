"""Position in a run → seed of its random numbers, so that no random state has to be saved."""

from __future__ import annotations

import hashlib


def step_seed(seed: int, step: int, rank: int) -> int:
    """Derive the seed of a step's random numbers on one data-parallel rank, from 0 to 2**63 - 1."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {step} {rank}".encode(), digest_size=8).digest(), "little") >> 1
