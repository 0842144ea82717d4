"""Process that sends the record of a run to one tracker, while the run goes on.

`python -m forge.trackers._worker NAME SECONDS < JSON`: the first line of standard input is the run. Once standard input ends,
which it does however the run ends, what is left is sent, for so many seconds at most.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge.trackers._record import Record, figures, kind_of
from forge.trackers._state import Sent, read_sent, write_sent
from forge.trackers._table import make_tracker
from forge.trackers._tracker import TrackedRun, Tracker

_POLL_SECONDS = 0.2
_RETRY_SECONDS = (1, 5, 15, 60)
"""Pauses between attempts; the last one repeats."""
_LAST_ATTEMPTS = 3
"""Attempts once the run has ended."""


def main(name: str, seconds: str) -> None:
    """Send until the run has ended and all is sent, or the time is over."""
    about = json.loads(sys.stdin.readline())
    run = TrackedRun(
        directory=Path(about["directory"]), id=about["id"], settings=about["trackers"], num_steps=about["num_steps"]
    )
    ended = threading.Event()
    threading.Thread(target=_watch, args=(ended, float(seconds)), daemon=True).start()
    sys.exit(0 if send(name, run, about["settings"], ended) else 1)


def send(name: str, run: TrackedRun, settings: dict[str, Any], ended: threading.Event) -> bool:
    """Send settings and record to a tracker until the run has ended; try again on any error.

    Returns:
        Whether all was sent.

    """
    sent = read_sent(run.directory, name)
    attempts, last_attempts = 0, _LAST_ATTEMPTS
    while last_attempts:
        try:
            _send_all(name, run, settings, ended, sent)
        except Exception as error:  # noqa: BLE001 - a tracker may raise anything
            sent.error = f"{type(error).__name__}: {' '.join(str(error).split())}"
            write_sent(run.directory, name, sent)
            print(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {name}: {sent.error}", flush=True)
            if ended.wait(_RETRY_SECONDS[min(attempts, len(_RETRY_SECONDS) - 1)]):
                last_attempts -= 1
                time.sleep(1)
            attempts += 1
        else:
            return True
    return False


def _send_all(name: str, run: TrackedRun, settings: dict[str, Any], ended: threading.Event, sent: Sent) -> None:
    """Open the tracker, send line after line, and close it once the run has ended."""
    if ended.is_set() and sent.settings and sent.error is None and not any(Record(_metrics(run), sent.sent).new()):
        return
    tracker = make_tracker(name, run)
    tracker.start()
    try:
        if not sent.settings:
            tracker.store_init_configuration(settings)
            sent.settings = True
        record = Record(_metrics(run), sent.sent)
        while True:
            over = ended.is_set()  # asked before the file is read, so that its last line is read too
            _send_new(tracker, record, sent, lambda: write_sent(run.directory, name, sent))
            if over:
                break
            ended.wait(_POLL_SECONDS)
    finally:
        tracker.finish()
    sent.error = None
    write_sent(run.directory, name, sent)


def _send_new(tracker: Tracker, record: Record, sent: Sent, save: Callable[[], None]) -> None:
    for values in record.new():
        tracker.log(figures(values), step=values["step"])
        sent.sent = {**record.seen, kind_of(values): values["step"]}
        sent.lines += 1
        sent.error = None
        save()


def _metrics(run: TrackedRun) -> Path:
    return run.directory / "metrics.jsonl"


def _watch(ended: threading.Event, seconds: float) -> None:
    """Wait for the end of the run, and end this process when the time after it is over."""
    sys.stdin.read()
    ended.set()
    time.sleep(seconds)
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
