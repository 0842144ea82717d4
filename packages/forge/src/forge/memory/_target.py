"""Words such as 8xH100-80GB → how many devices a run would have, and how much memory each."""

from __future__ import annotations

import re

import attrs

import forge_accel
from forge._errors import SettingsError

_WORDS = re.compile(r"(?:([0-9]{1,6})\s*x\s*)?([A-Za-z][\w.]*?)?-?([0-9]{1,6}(?:\.[0-9]+)?)\s*(?:GB|GiB|G)", re.IGNORECASE)
CONTEXT = 2**29
"""Bytes that the context of a chip elsewhere is taken to need."""
_BLOCK = 512
"""Bytes to which the allocators of accelerators round up."""
_MOST_TOKENS = 65_536
"""Tokens of a micro-batch that keep any chip busy: more are not chosen, whatever its memory."""


@attrs.frozen(kw_only=True)
class Target:
    """Devices that a memory plan is for."""

    name: str
    devices: int | None
    """Number of them; None: as many as the run has ranks."""
    limit: int | None
    """Bytes of each that tensors may fill; None where they are not known."""
    block: int = 1
    """Bytes to which an allocation is rounded up."""
    most_tokens: int = _MOST_TOKENS
    """Tokens of a micro-batch beyond which more save no time."""
    elsewhere: bool = False
    """Whether it is other devices than this process has."""

    @classmethod
    def here(cls, machine: forge_accel.Accelerator, *, processes: int = 1) -> Target:
        """Return this process' machine; so many processes share its memory if they share its device."""
        limit = machine.memory_limit_bytes()
        if limit is not None and type(machine).count() == 0:
            limit //= processes
        return cls(
            name=machine.name,
            devices=None,
            limit=limit,
            block=max(1, machine.allocated_bytes(1)),
            most_tokens=machine.most_tokens or _MOST_TOKENS,
        )

    @classmethod
    def parse(cls, words: str) -> Target:
        """Read `8xH100-80GB`, `A100-40GB` or `24GB`.

        A gigabyte is 2**30 bytes, of which a chip's context takes half of one.

        Raises:
            SettingsError: it is none of these.

        >>> Target.parse("8xH100-80GB").devices, Target.parse("24GB").limit
        (8, 25232932864)

        """
        found = _WORDS.fullmatch(words.strip()) if isinstance(words, str) else None
        if found is None or float(found[3]) <= 0.5 or (found[1] is not None and int(found[1]) == 0):
            raise SettingsError(
                f"machine={words!r}: give the number of devices, a name and the memory of each, such as 8xH100-80GB, or 24GB."
            )
        limit = int(float(found[3]) * 2**30) - CONTEXT
        return cls(name=words.strip(), devices=int(found[1]) if found[1] else None, limit=limit, block=_BLOCK, elsewhere=True)

    def allocated(self, size: int) -> int:
        """Return the bytes that an allocator takes for `size`."""
        return -(-size // self.block) * self.block
