"""Processor and memory of this machine, read from /proc."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

PROC = Path("/proc")


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
    """Read the machine's memory in bytes; None where the system does not report it."""
    return _bytes(PROC / "meminfo", "MemTotal")


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


def _cpuinfo(field: str) -> str:
    return _value(PROC / "cpuinfo", field) or ""


def _bytes(path: Path, field: str) -> int | None:
    words = (_value(path, field) or "").split()
    return int(words[0]) * 1024 if words and words[0].isdigit() else None


def _value(path: Path, field: str) -> str | None:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon and name.strip() == field:
            return value.strip()
    return None
