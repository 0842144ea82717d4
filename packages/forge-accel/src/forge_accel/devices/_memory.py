"""Worst moment of tensors' memory, measured by torch's profiler or by the allocator."""

from __future__ import annotations

import json
import os
import re
import tempfile
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, ClassVar

from torch.autograd.profiler import profile
from torch.profiler import ProfilerActivity

BLOCK_BYTES = 512
"""Granularity of torch's caching allocators."""
CONTEXT_BYTES = 2**29
"""Bytes that a chip's libraries take beside torch's allocator."""

_ASKED = re.compile(r"[Tt]ried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB)|Allocation failed for size::(\d+)")
_NO_MEMORY = ("DefaultCPUAllocator: can't allocate memory", "can't start new thread")
"""What torch's allocator says, and Python where there is no memory for a thread's stack."""
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class MemoryMeter(ABC):
    """Measures the worst moment between `start` and `stop`."""

    records: ClassVar[bool] = False
    """Whether each allocation is recorded, which takes time, and memory until `add_up` or `stop`."""

    @abstractmethod
    def start(self, held: int) -> None:
        """Begin to measure; `held` are the bytes of the tensors that are there already."""

    @abstractmethod
    def stop(self) -> int:
        """Return the bytes of all tensors at the worst moment."""

    def add_up(self) -> None:  # noqa: B027 - most record nothing
        """Add up what was recorded so far, and let go of it; the measurement goes on."""

    def abandon(self) -> None:  # noqa: B027 - most have nothing that goes on
        """End without an answer, as where what was measured failed."""


def _of_memory(found: dict[str, Any]) -> Any:
    """Return (time, number, bytes) of a trace's event of memory, and None of any other."""
    if "Bytes" in found:
        return found.get("Ev Idx", 0), found["Bytes"]
    if found.get("name") == "[memory]":
        return found["ts"], *found["args"]
    return found if "traceEvents" in found else None


class ProfilerMeter(MemoryMeter):
    """Counts what torch's allocator on the CPU takes and frees, as the profiler saw it.

    An event takes 2 KB until it is added up, and 7 microseconds.
    """

    records = True

    def __init__(self) -> None:
        self._profile: Any = None

    def start(self, held: int) -> None:
        """Begin to record."""
        # Its library writes two lines to stderr for each recording otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._held = self._most = held
        self._record()

    def add_up(self) -> None:
        """Add up what was recorded so far, and record anew."""
        self._end()
        self._record()

    def abandon(self) -> None:
        """End the recording, which would go on in the process otherwise."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)
        self._profile = None

    def stop(self) -> int:
        """Add up what was taken and freed, in order."""
        self._end()
        return self._most

    def _record(self) -> None:
        # That of torch.profiler, which this is within it, refers to itself: its records would stay until Python collects.
        self._profile = profile(use_kineto=True, profile_memory=True)
        self._profile.__enter__()
        # Operators are events too, as large and as many, and not asked for. All three: else torch warns of each one missing.
        self._profile.toggle_collection_dynamic(
            enabled=False, activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA, ProfilerActivity.XPU]
        )

    def _end(self) -> None:
        made, self._profile = self._profile, None
        made.__exit__(None, None, None)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            made.export_chrome_trace(str(file))
            del made
            trace = json.loads(file.read_text(encoding="utf-8"), object_hook=_of_memory)["traceEvents"]
        for *_, number in sorted(event for event in trace if event is not None):
            self._held += number
            self._most = max(self._most, self._held)


class AllocatorMeter(MemoryMeter):
    """Peak of a device's caching allocator, without what it caches."""

    def __init__(self, machine: Any) -> None:
        self._machine = machine

    def start(self, held: int) -> None:  # noqa: ARG002 - the allocator counts what is there
        """Reset the peak."""
        self._machine.reset_peak_memory()

    def stop(self) -> int:
        """Read the peak."""
        self._machine.synchronize()
        return self._machine.peak_memory_bytes() or 0


def host_is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is Python's or torch's for a host without memory left."""
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    )


def asked_bytes(error: BaseException) -> int | None:
    """Read from an error how many bytes were asked for; None where it does not say.

    >>> asked_bytes(RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."))
    4096
    >>> asked_bytes(RuntimeError("Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"))
    2147483648
    >>> asked_bytes(RuntimeError("FATAL ERROR :: MODULE:PT_DEVMEM Allocation failed for size::1073741824 (1024)MB"))
    1073741824

    """
    found = _ASKED.search(str(error))
    if found is None:
        return None
    return int(found[3]) if found[3] else int(float(found[1]) * _UNITS[found[2]])
