"""The machine's clocks → the times that a run writes, whose differences are durations."""

from __future__ import annotations

import datetime
import time


def since_boot() -> float:
    """Return seconds that go on while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_BEGAN = time.time() - since_boot()


def now() -> datetime.datetime:
    """Return the time by the clock as it was when this process began.

    A clock that is set meanwhile moves nothing, so that differences are durations.
    """
    return datetime.datetime.fromtimestamp(_BEGAN + since_boot(), datetime.UTC)
