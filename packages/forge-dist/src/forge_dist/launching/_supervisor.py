"""A launcher's signals → its workers; a worker that outlives the failure of another → killed within seconds."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from forge_dist.launching._rendezvous import Meeting
from forge_dist.ranks._heartbeat import Attention

# How long the workers of a node may go on after one of them failed: what they have left to say is in their exceptions. torch's agent
# would wait 30 seconds for each, in which a worker that hangs in a collective does nothing.
AFTER_FAILURE_SECONDS = 5.0
_TICK_SECONDS = 0.05


class Interrupted(BaseException):
    """A signal came while there were no workers to tell."""


class Overseer:
    """Knows the workers' processes, tells them of signals, and sees when each of them ended."""

    def __init__(self, meeting: Meeting, pids: Callable[[], list[int]]) -> None:
        self._meeting, self._pids = meeting, pids
        self._done = threading.Event()
        self._waiting: list[int] = []
        self._told: dict[int, int] = {}
        self.signals: list[int] = []
        """Signals that came, in order."""
        self.ended: dict[int, float] = {}
        """Process → when it was seen to have ended (seconds since 1970)."""
        self.stopped: set[int] = set()
        """Processes that were killed because they outlived another's failure."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take SIGTERM and SIGINT (in the main thread only, where Python allows it) and watch the workers meanwhile."""
        before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                before[number] = signal.signal(number, self._take)
        thread = threading.Thread(target=self._watch, name="forge-overseer", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            for number, handler in before.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def with_nobody(self) -> "Overseer":
        """Let go of the agent, which can be freed then, and keep what was seen."""
        self._pids = list
        return self

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        if not self._pids():
            raise Interrupted

    def _watch(self) -> None:
        clock = Attention()
        looked_at, since = -1, 0.0
        while not self._done.wait(_TICK_SECONDS):
            pids = self._pids()
            alive = [pid for pid in pids if self._lives(pid)]
            self._forward(alive)
            now = clock.tick()
            if self._meeting.looked_at != looked_at or len(alive) == len(pids):
                looked_at, since = self._meeting.looked_at, now
            elif alive and now - since > AFTER_FAILURE_SECONDS:
                # Some ended, others live, and the agent is not in its loop any more: it waits for them after a failure.
                for pid in alive:
                    self.stopped.add(pid)
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)

    def _lives(self, pid: int) -> bool:
        if pid in self.ended:
            return False
        try:
            # WNOWAIT: the agent reaps its children itself.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return True
        except ChildProcessError:
            pass
        self.ended[pid] = time.time()
        return False

    def _forward(self, alive: list[int]) -> None:
        """Give each living worker every signal that it has not had."""
        came = list(self.signals)
        for pid in alive:
            for number in came[self._told.get(pid, 0) :]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                # Two equal signals at once would arrive as one, and the second has a meaning of its own.
                self._told[pid] = self._told.get(pid, 0) + 1
                break
