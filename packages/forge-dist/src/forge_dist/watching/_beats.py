"""Beats of this process: what it does now, and that it moved."""

import os
import threading
import time
from functools import cache
from pathlib import Path

from forge_dist.watching._board import Beat, Board
from forge_dist.watching._stacks import dump_on_signal, stop_dumping

FLOOR_SECONDS = 600.0
"""Least time without a beat that counts as a stall by default."""
PHASE_SECONDS = 1800.0
"""Time without a beat, and without reading or writing, after which loading, an export or another long phase has stalled."""
_TIMES_SLOWEST = 10


class Beats:
    """Writer of this process's beats.

    Args:
        board: where they are written.
        timeout: seconds that a step may stand still; None: ten times the slowest step so far, at least ten minutes.
    """

    def __init__(self, board: Board, timeout: float | None) -> None:
        self._board, self._timeout = board, timeout
        # A thread that saves in the background beats too.
        self._lock = threading.Lock()
        self._count, self._step, self._first = 0, -1, 0
        self._doing, self._bound = "starting", self._phase_bound()
        self._began, self._slowest, self._apart = time.monotonic(), 0.0, False
        self.beat()

    @property
    def path(self) -> Path:
        """Where they are written."""
        return self._board.path

    @property
    def count(self) -> int:
        """Number of beats so far."""
        return self._count

    def beat(self, step: int | None = None) -> None:
        """Note that this process moved; `step`: that this step is made, or that the next begins."""
        with self._lock:
            if step is not None:
                self._finish_step(step)
            self._count += 1
            self._board.write(Beat(self._count, self._step, self._bound, self._step_bound(), self._doing))

    def doing(self, what: str) -> None:
        """Note a phase between two steps, which may take longer than a step."""
        with self._lock:
            self._doing, self._bound, self._apart = what, self._phase_bound(), True
        self.beat()

    def stepping(self) -> None:
        """Note that the next step begins."""
        with self._lock:
            self._enter_step()
        self.beat()

    def elsewhere(self, count: int) -> None:
        """Note the beats of other nodes."""
        self._board.write_elsewhere(count)

    def _finish_step(self, step: int) -> None:
        now = time.monotonic()
        if self._step < 0:
            self._first = step
        elif not self._apart and step > self._first + 1:
            # The first one compiles and fills caches; what was done between two steps is no part of one.
            self._slowest = max(self._slowest, now - self._began)
        self._step = step
        self._enter_step()

    def _enter_step(self) -> None:
        first = self._step == self._first
        self._doing = f"step {self._step + 1}" + (", its first: it compiles what it needs" if first else "")
        self._bound = max(self._step_bound(), FLOOR_SECONDS) if first else self._step_bound()
        self._began, self._apart = time.monotonic(), False

    def _step_bound(self) -> float:
        return self._timeout if self._timeout is not None else max(FLOOR_SECONDS, _TIMES_SLOWEST * self._slowest)

    def _phase_bound(self) -> float:
        return max(PHASE_SECONDS, self._timeout or 0.0)

    def close(self) -> None:
        """Write no more; whoever watches is told to watch no more."""
        with self._lock:
            self._board.write(Beat(self._count + 1, self._step, 0.0, 0.0, "ended"))
            self._board.close()


_current: Beats | None = None


def open_beats(path: Path, timeout: float | None) -> Beats:
    """Let `beat` and `doing` write to the file `path`; a signal writes stacks beside it."""
    global _current  # noqa: PLW0603 - a process is watched once
    _forget_in_children()
    dump_on_signal(path)
    _current = Beats(Board(path, make=True), timeout)
    return _current


@cache
def _forget_in_children() -> None:
    """Keep processes that are forked from beating in this one's name."""

    def forget() -> None:
        global _current  # noqa: PLW0603 - as above
        _current = None

    os.register_at_fork(after_in_child=forget)


def close_beats() -> None:
    """Let `beat` and `doing` do nothing."""
    global _current
    open_one, _current = _current, None
    if open_one is not None:
        open_one.close()
        stop_dumping()


def current_beats() -> Beats | None:
    """Return the open beats of this process, if any."""
    return _current


def beat(step: int | None = None) -> None:
    """Tell whoever watches this process that it moves; without one, do nothing.

    Args:
        step: the optimizer step that is finished; before the first one the number that the run begins after.
    """
    if _current is not None:
        _current.beat(step)


def doing(what: str = "") -> None:
    """Tell whoever watches this process what it begins to do.

    Args:
        what: a phase that may take longer than a step, such as "exporting"; "" for the next step.
    """
    if _current is None:
        return
    if what:
        _current.doing(what)
    else:
        _current.stepping()
