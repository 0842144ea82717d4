"""The machine's clocks → the times that a run writes, whose differences are durations."""

from __future__ import annotations

import datetime
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def since_boot() -> float:
    """Return seconds that go on while the machine sleeps, where the system has such a clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


_BEGAN = time.time() - since_boot()
_shift = 0.0
"""Seconds that the run of this process is ahead of that clock."""
_LAST = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC).timestamp()
"""Last second that a date can hold: a run whose clock was set there once goes on from it."""
_TAIL_BYTES = 1 << 16


def now() -> datetime.datetime:
    """Return the time by the clock as it was when this process began, or later (`go_on_after`).

    A clock that is set meanwhile moves nothing, so that differences are durations. They end with the year 9999.
    """
    return datetime.datetime.fromtimestamp(min(_BEGAN + since_boot() + _shift, _LAST), datetime.UTC)


def go_on_after(files: Iterable[Path]) -> float:
    """Let `now` go on from the last `time` of JSONL files where the clock is behind it.

    What an earlier run of this process asked for ends.

    Returns:
        By how many seconds it is behind; 0 where it is not.

    """
    global _shift  # noqa: PLW0603 - a process has one run
    clock = _BEGAN + since_boot()
    _shift = max([0.0, *(last - clock for file in files if (last := _last_time(file)) is not None)])
    return _shift


def _last_time(file: Path) -> float | None:
    """Return the time of a file's last whole line, in seconds since 1970."""
    try:
        with file.open("rb") as opened:
            opened.seek(max(0, opened.seek(0, os.SEEK_END) - _TAIL_BYTES))
            lines = opened.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        with suppress(ValueError, TypeError, KeyError, RecursionError, OverflowError):
            return datetime.datetime.fromisoformat(json.loads(line)["time"]).timestamp()
    return None
