"""Worst moment of tensors' memory, measured by torch's profiler or by the allocator."""

from __future__ import annotations

import json
import os
import re
import tempfile
import warnings
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile

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

    @abstractmethod
    def start(self, held: int) -> None:
        """Begin to measure; `held` are the bytes of the tensors that are there already."""

    @abstractmethod
    def stop(self) -> int:
        """Return the bytes of all tensors at the worst moment."""

    def abandon(self) -> None:  # noqa: B027 - most have nothing that goes on
        """End without an answer, as where what was measured failed."""


def _of_memory(found: dict[str, Any]) -> dict[str, Any] | None:
    """Return an object of a trace, or None for an event that is not one of memory, as most are."""
    return found if found.get("name", "[memory]") == "[memory]" or "traceEvents" in found else None


class ProfilerMeter(MemoryMeter):
    """Counts what torch's allocator on the CPU takes and frees, as the profiler saw it."""

    def start(self, held: int) -> None:
        """Begin to record."""
        # Its library writes two lines to stderr for each recording otherwise.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._held = held
        # Several recordings are kept with acc_events=True alone, which makes a Python object of each operator of this one: a
        # minute and gigabytes for a step of a thousand documents.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        with warnings.catch_warnings():
            # torch 2.11 says so even of one recording.
            warnings.filterwarnings("ignore", message="Warning: Profiler clears events")
            self._profile.start()

    def abandon(self) -> None:
        """End the recording, which would go on in the process otherwise."""
        self._profile.stop()
        del self._profile

    def stop(self) -> int:
        """Add up what was taken and freed, in order."""
        self._profile.stop()
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "trace.json"
            self._profile.export_chrome_trace(str(file))
            trace = json.loads(file.read_text(encoding="utf-8"), object_hook=_of_memory)["traceEvents"]
        del self._profile
        events = sorted(
            (event["ts"], event["args"].get("Ev Idx", 0), event["args"]["Bytes"])
            for event in trace
            if event and "Bytes" in event["args"]
        )
        held = most = 0
        for _, _, number in events:
            held += number
            most = max(most, held)
        return self._held + most


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
