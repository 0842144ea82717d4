"""A run and a tracker → the process that sends, which the run starts, forgets and ends.

A process of its own, so that a tracker that hangs, dies, holds the interpreter or draws random numbers does so elsewhere.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import IO, Any

from forge._counted import counted
from forge.trackers._record import Record
from forge.trackers._state import read_sent, state_file
from forge.trackers._tracker import TrackedRun

_RESTART_SECONDS = 60.0
_RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which a library in the process would take it for one of the run's ranks."""


class TrackerProcess:
    """Process that sends the record of a run to one tracker.

    Args:
        name: the tracker.
        run: the run.
        settings: what is sent beside the record.
        seconds: for what is left once the run has ended.

    """

    def __init__(self, name: str, run: TrackedRun, settings: Mapping[str, Any], seconds: float) -> None:
        self.name = name
        self._run, self._settings, self._seconds = run, settings, seconds
        self._process: subprocess.Popen[str] | None = None
        self._began = 0.0
        self._before = 0
        """Time of change of the tracker's file when the process was started, in nanoseconds."""
        self._said = False

    def start(self) -> None:
        """Start the process. Raises OSError where this machine starts none."""
        self._began, self._before = time.monotonic(), self._changed()
        environ = {name: value for name, value in os.environ.items() if name not in _RANK_VARIABLES}
        # What this process can import, that one can.
        environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        self._run.files.mkdir(exist_ok=True)
        with (self._run.files / "log.txt").open("a", encoding="utf-8") as log:
            self._process = subprocess.Popen(  # noqa: S603 - this very package
                [sys.executable, "-m", "forge.trackers._worker", self.name, str(self._seconds)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environ,
                text=True,
                # Ctrl-C is the run's, which ends this process in its own time.
                start_new_session=True,
            )
        about = {
            "directory": str(self._run.directory),
            "id": self._run.id,
            "trackers": dict(self._run.settings),
            "num_steps": self._run.num_steps,
        }
        with contextlib.suppress(BrokenPipeError):
            self._stdin.write(json.dumps({**about, "settings": dict(self._settings)}) + "\n")
            self._stdin.flush()

    def first_failure(self) -> str | None:
        """Return why an attempt of it failed, the first time that one did; else None."""
        if self._said or self._changed() == self._before:
            return None
        error = read_sent(self._run.directory, self.name).error
        self._said = error is not None
        return error

    def restart_if_dead(self) -> None:
        """Start it again where it has died, once a minute at most."""
        dead = self._process is not None and self._process.poll() is not None
        if dead and time.monotonic() - self._began >= _RESTART_SECONDS:
            self._close()
            with contextlib.suppress(OSError):
                self.start()

    def end(self) -> None:
        """Tell it that the run has ended; it sends what is left, in the time that it has."""
        if self._process is not None:
            self._close()

    def wait(self, until: float) -> str | None:
        """Wait for its end until then (`time.monotonic`), and end it.

        Returns:
            What was not sent, and why; None where all was.

        """
        if self._process is not None:
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(0.0, until - time.monotonic()))
            finally:
                if self._process.poll() is None:
                    self._process.kill()
                    self._process.wait()
        sent = read_sent(self._run.directory, self.name)
        left = sum(1 for _ in Record(self._run.directory / "metrics.jsonl", sent.sent).new())
        done = self._process is not None and self._process.returncode == 0
        if not left and done:
            return None
        reason = sent.error or (
            "it did not answer in time" if self._process is not None else "its process could not be started"
        )
        if not left:
            return f"{self.name}: {counted(sent.lines, 'lines')} handed over, but it did not close ({reason})"
        return f"{self.name}: {counted(left, 'lines')} {'was' if left == 1 else 'were'} not sent ({reason})"

    def _changed(self) -> int:
        try:
            return state_file(self._run.directory, self.name).stat().st_mtime_ns
        except OSError:
            return 0

    @property
    def _stdin(self) -> IO[str]:
        assert self._process is not None
        assert self._process.stdin is not None
        return self._process.stdin

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._stdin.close()
