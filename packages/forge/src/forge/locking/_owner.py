"""Process → the record of a run directory's owner, and whether it is proved to be gone.

A directory may be reached from several hosts, and from containers of one host, whose numbers of processes mean nothing to each
other. So a record names the space in which its number of a process is true: the boot of a kernel and a namespace of it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self

import attrs

from forge._printable import printable

_WIDTH = 64
"""Characters of a name that are shown."""
_PROC = Path("/proc")
_KINDS: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("token", "host", "space", "renewed"), str),
    **dict.fromkeys(("pid", "started", "renewals"), int),
    "lease": (int, float),
}
"""Field of a record → what it may hold."""


@attrs.frozen(kw_only=True)
class Owner:
    """Process that owns, or owned, a run directory."""

    token: str
    """Drawn at random: two owners never have the same."""
    host: str
    """Name of its host, for people."""
    space: str
    """Where `pid` and `started` are true (`space_here`); empty where that cannot be told."""
    pid: int
    """Its number."""
    started: int
    """When it was started, in ticks since the boot; 0 where that cannot be told."""
    lease: float
    """Seconds without a renewal after which others may take the directory over."""
    renewals: int = 0
    """How often it renewed its lease; others watch whether this goes on."""
    renewed: str = ""
    """When, by its own clock (UTC); for people alone."""

    @classmethod
    def here(cls, token: str, lease: float) -> Self:
        """Describe this process."""
        pid = os.getpid()
        return cls(token=token, host=socket.gethostname(), space=space_here(), pid=pid, started=_life(pid)[1], lease=lease)

    @classmethod
    def read(cls, text: bytes) -> Self | None:
        """Read a record; None where it is half written, or is none."""
        try:
            found: Any = json.loads(text)
        except ValueError:
            return None
        if not isinstance(found, Mapping) or not all(
            isinstance(found.get(name), kind) and not isinstance(found[name], bool) for name, kind in _KINDS.items()
        ):
            return None
        return cls(**{name: found[name] for name in _KINDS})

    def to_bytes(self) -> bytes:
        """Write the record, always equally long, so that it can be written over in place."""
        text = json.dumps(attrs.asdict(self))
        digits = len(str(self.renewals)) + len(self.renewed)
        return (text + " " * (_WIDTH - digits) + "\n").encode()

    @property
    def is_gone(self) -> bool:
        """Whether this process is proved to be gone: never of one that cannot be asked from here."""
        if not self.space or self.space != space_here():
            return False
        lives, started = _life(self.pid)
        return not lives or (0 not in (started, self.started) and started != self.started)

    def __str__(self) -> str:
        host, renewed = printable(self.host[:_WIDTH]), printable(self.renewed[:_WIDTH])
        since = f", which last renewed its lease at {renewed} UTC by its own clock" if renewed else ""
        return f"process {self.pid} on host {host}{since}"


@cache
def space_here() -> str:
    """Return the name of the space in which numbers of processes are those of this process.

    On Linux the boot and the namespaces of processes and of time: containers of one host share the first alone.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        spaces = [os.readlink(_PROC / "self/ns" / name) for name in ("pid", "time") if (_PROC / "self/ns" / name).is_symlink()]
    except (OSError, ValueError):
        # A system without /proc has no containers that share it; one that hides it may have.
        return "" if sys.platform.startswith("linux") else f"{socket.gethostname()} {uuid.getnode()}"
    return " ".join([boot, *spaces])


def _life(pid: int) -> tuple[bool, int]:
    """Return whether a process of this space lives, and when it was started (0: cannot be told)."""
    try:
        # The name, in parentheses, may hold anything.
        fields = (_PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")[2].split()
        return fields[0] not in ("Z", "X"), int(fields[19])
    except (OSError, IndexError, ValueError):
        # No such process, or one that /proc hides from us.
        pass
    if not 0 < pid < 2**31:
        return False, 0
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False, 0
    except OSError:
        pass
    return True, 0
