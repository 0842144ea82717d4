"""Memory of the host that can still be taken: what the kernel says, and a container's limit."""

from pathlib import Path

_PROC = Path("/proc")
_GROUP = Path("/sys/fs/cgroup")
_SPARE = 0.1
"""Share of what is free that stays free: page cache in use, and what the other parts of a run take meanwhile."""


def room_for(size: int, *, sharing: int = 1) -> bool:
    """Return whether `size` bytes fit on each of `sharing` processes of this host.

    True if unknown. A process that takes more than there is would not get an error, but be killed by the kernel.
    """
    free = available_bytes()
    return free is None or size * sharing <= free * (1 - _SPARE)


def available_bytes() -> int | None:
    """Read how many bytes a process may still take; None where the system does not say."""
    found = [number for number in (_meminfo(), _within_group()) if number is not None]
    return min(found, default=None)


def _meminfo() -> int | None:
    for line in _lines(_PROC / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _within_group() -> int | None:
    """Read what the container's limit leaves (cgroup v2), its page cache counted as free."""
    (most, *_), (used, *_) = (_lines(_GROUP / name) or [""] for name in ("memory.max", "memory.current"))
    if not most.isdigit() or not used.isdigit():
        return None
    fields = (line.partition(" ") for line in _lines(_GROUP / "memory.stat"))
    cached = sum(int(value) for name, _, value in fields if name == "file")
    return max(0, int(most) - int(used) + cached)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except (OSError, ValueError):
        return []
