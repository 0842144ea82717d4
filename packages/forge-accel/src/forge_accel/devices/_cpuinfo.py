"""/proc → what this machine's processor is called and can do, and how much memory there is and was used."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import torch

PROC = Path("/proc")


def features() -> frozenset[str]:
    """List the processor's instruction sets, as Linux spells them (`avx2`, `avx512_bf16`, `amx_bf16`, Arm's `bf16`).

    Where there is no /proc/cpuinfo, what torch can tell: less, and never more than the processor has.
    """
    for field in ("flags", "Features"):
        found = _cpuinfo(field)
        if found:
            return frozenset(found.split())
    return frozenset({torch.backends.cpu.get_cpu_capability().lower()})


def processor() -> str:
    """Name the processor, as well as the system can."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def memory_bytes() -> int | None:
    """Read how much memory the machine has; None where the system does not say."""
    return _bytes(PROC / "meminfo", "MemTotal")


def peak_rss_bytes() -> int | None:
    """Read the most memory that this process held: VmHWM, which can be reset, else getrusage, which cannot."""
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
    """Let VmHWM start anew from what is held now (proc(5), clear_refs); False where that is not allowed."""
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
