"""The one JSON line that a benchmark prints on stdout: figures, machine and versions.

Every line has the same shape: `benchmark`, `claim`, `ratio` (how many times better than the named baseline, so larger is
better), `target`, `met` (null at toy size), `toy`, then what the benchmark measured, `machine` and `versions`. Notes for a
person go to stderr.
"""

import importlib.metadata
import json
import logging
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

LIBRARIES = (
    "torch",
    "transformers",
    "tokenizers",
    "peft",
    "trl",
    "accelerate",
    "datasets",
    "numpy",
    "numba",
    "instructlab-training",
    "rhai-innovation-mini-trainer",
)
FORGE = ("forge-llm", "forge-data", "forge-packing", "forge-accel", "forge-dist", "forge-algos")

# Where DeepSpeed is installed transformers imports it, and its notes go to stdout, where only the line may be.
logging.getLogger("DeepSpeed").addFilter(lambda record: record.levelno >= logging.ERROR)


def note(text: str) -> None:
    """Print a note for a person, on stderr."""
    print(text, file=sys.stderr, flush=True)


def versions(names: Iterable[str] = (*LIBRARIES, *FORGE)) -> dict[str, str]:
    """Return the installed version of every distribution that a figure may depend on."""
    found = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """Describe the machine: processor, cores this process may use, memory in bytes, load at the start."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "platform": platform.platform(),
        "load_1_minute": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def emit(benchmark: str, claim: str, ratio: float, target: float, *, toy: bool, at: dict[str, Any], **figures: Any) -> None:
    """Print the line. `at` is the value of `machine()` before the measurement."""
    line = {
        "benchmark": benchmark,
        "claim": claim,
        "ratio": round(ratio, 4),
        "target": target,
        "met": None if toy else ratio >= target,
        "toy": toy,
        **figures,
        "machine": at,
        "versions": versions(),
    }
    print(json.dumps(line), flush=True)
    verdict = "toy size, proves nothing" if toy else "met" if ratio >= target else "MISSED"
    note(f"{benchmark}: ratio {ratio:.3f}, target {target}: {verdict}")
