"""Processor and memory of this machine, read from /proc, and what a process may have of it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

PROC = Path("/proc")
GROUPS = Path("/sys/fs/cgroup")


def features() -> frozenset[str]:
    """List the processor's instruction sets as Linux names them: `avx2`, `amx_bf16`, `bf16`.

    Without /proc/cpuinfo, the one that torch reports: less, and never more than the processor has.
    """
    for field in ("flags", "Features"):
        found = _cpuinfo(field)
        if found:
            return frozenset(found.split())
    return frozenset({torch.backends.cpu.get_cpu_capability().lower()})


def processor() -> str:
    """Return the processor's name, as far as the system knows it."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Read the memory that this process may fill, in bytes; None where it is not reported.

    It is the machine's, or less: what its control group allows (a container's, a pod's, a Slurm job's), or `ulimit -v`.
    """
    found = [_bytes(PROC / "meminfo", "MemTotal"), *_group_limits(), _address_space()]
    return min((number for number in found if number is not None), default=None)


def rss_bytes() -> int | None:
    """Read the resident memory of this process in bytes; None where it is not reported."""
    return _bytes(PROC / "self" / "status", "VmRSS")


def peak_rss_bytes() -> int | None:
    """Read the peak memory of this process in bytes; None where the system does not report it.

    It is VmHWM, which can be reset, else that of getrusage, which cannot.
    """
    peak = _bytes(PROC / "self" / "status", "VmHWM")
    if peak is not None:
        return peak
    try:
        import resource
    except ImportError:
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # In kilobytes everywhere but on macOS (getrusage's manual there).
    return largest if sys.platform == "darwin" else largest * 1024


def reset_peak_rss() -> bool:
    """Reset VmHWM to the memory held now (proc(5), clear_refs); False where that is not allowed."""
    if _bytes(PROC / "self" / "status", "VmHWM") is None:
        return False
    try:
        (PROC / "self" / "clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _group_limits() -> Iterator[int]:
    """Yield the limits of this process' control groups and those around (cgroups(7), 1 and 2)."""
    for line in _lines(PROC / "self" / "cgroup"):
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers:
            root, name = GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # A container sees its own group as the root, and may be told the host's path.
        names = [part for part in path.split("/") if part]
        for depth in range(len(names), -1, -1):
            for words in _lines(root.joinpath(*names[:depth], name))[:1]:
                if words.strip().isdigit():
                    yield int(words)


def _address_space() -> int | None:
    try:
        import resource
    except ImportError:
        return None
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    return None if soft == resource.RLIM_INFINITY else soft


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _cpuinfo(field: str) -> str:
    return _value(PROC / "cpuinfo", field) or ""


def _bytes(path: Path, field: str) -> int | None:
    words = (_value(path, field) or "").split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None


def _value(path: Path, field: str) -> str | None:
    for line in _lines(path):
        name, colon, value = line.partition(":")
        if colon and name.strip() == field:
            return value.strip()
    return None
