"""Lines that a run records → its trackers and callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import attrs

from forge._redact import redact
from forge.trackers._callbacks import Callbacks, random_state_kept
from forge.trackers._process import TrackerProcess
from forge.trackers._tracker import TrackedRun

Result = TypeVar("Result")

_END_SECONDS = 30.0
_STOPPED_SECONDS = 5.0
"""How long a run that was stopped or failed waits for its trackers."""
_SLOW_SECONDS = 5.0
"""Time of one call of the callbacks after which the run says, once, that it stands still meanwhile."""


class Watchers:
    """Trackers and callbacks of a run, on its first rank; a context manager around the run.

    Args:
        callbacks: the Python user's.
        note: prints and logs a line.
        seconds: how long a finished run waits for its trackers.

    """

    def __init__(
        self, callbacks: Callbacks | None = None, note: Callable[[str], None] = lambda _: None, seconds: float = _END_SECONDS
    ) -> None:
        self._callbacks = callbacks or Callbacks()
        self._note = note
        self._seconds = seconds
        self._processes: list[TrackerProcess] = []
        self._run: Path | None = None
        self._machine: Any = None
        self._slow = False

    def begin(
        self,
        folder: Path,
        run_id: str,
        trackers: Any,
        values: Mapping[str, Any],
        machine: Any,
        num_steps: int | None = None,
    ) -> None:
        """Start the trackers, once the run's metrics.jsonl is the one that it goes on with.

        Args:
            folder: of the trackers, in the run directory.
            run_id: identity of the run.
            trackers: their settings.
            values: every setting of the run.
            machine: the accelerator, whose random states callbacks leave as they are.
            num_steps: of the run; None where that is not known.

        """
        self._run, self._machine = folder.parent, machine
        own = attrs.asdict(trackers, filter=lambda field, _: field.name != "trackers")
        run = TrackedRun(directory=folder.parent, id=run_id, settings=own, num_steps=num_steps)
        sent = {name: _plain(value) for name, value in redact(dict(values)).items() if value is not None}
        for name in trackers.chosen():
            process = TrackerProcess(name, run, sent, self._seconds)
            try:
                process.start()
            except OSError as error:
                self._note(f"WARNING: trackers: {name} could not be started: {error}")
            self._processes.append(process)
        if self._processes:
            self._note(f"trackers: {', '.join(trackers.chosen())}, in the background; what they say is in {folder}/log.txt")

    def record(self, values: Mapping[str, Any]) -> None:
        """Hand a line of metrics.jsonl to the callbacks; the trackers read the file."""
        for process in self._processes:
            process.restart_if_dead()
            if (error := process.first_failure()) is not None:
                self._note(
                    f"WARNING: {process.name} has not got what the run recorded ({error}); it is tried again while the run "
                    f"goes on, and `forge track {self._run}` sends what is missing afterwards"
                )
        if not self._callbacks:
            return
        began = time.monotonic()
        with random_state_kept(self._machine):
            self._callbacks.record(values, self._note)
        took = time.monotonic() - began
        if took > _SLOW_SECONDS and not self._slow:
            self._slow = True
            self._note(
                f"WARNING: callbacks took {took:.0f} s after step {values.get('step')}, and the run stood still meanwhile: let "
                "a thread of yours, or a tracker, do what may wait."
            )

    def end(self, result: Result) -> Result:
        """Hand the result to the callbacks, and return it."""
        self._callbacks.end(result, self._note)
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        until = time.monotonic() + (self._seconds if error is None else min(self._seconds, _STOPPED_SECONDS))
        for process in self._processes:
            process.end()
        for left in filter(None, [process.wait(until) for process in self._processes]):
            self._note(f"WARNING: {left}: `forge track {self._run}` sends what is missing, and so does the next start")


def _plain(value: Any) -> bool | int | float | str:
    """Return a setting's value as trackers take it."""
    return value if isinstance(value, (bool, int, float, str)) else str(value)
