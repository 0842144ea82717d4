"""Supervisor of the workers: forwards signals, kills those that outlive another's failure."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from forge_dist.launching._rendezvous import Rendezvous
from forge_dist.ranks._heartbeat import AwakeClock

# How long the workers of a node may go on after one of them failed: what they still have to report is in their exceptions.
# torch's agent would wait 30 seconds for each, in which a worker that hangs in a collective does nothing.
AFTER_FAILURE_SECONDS = 5.0
_TICK_SECONDS = 0.05


class Interrupted(BaseException):
    """A signal that came while there were no workers to forward it to."""


class Supervisor:
    """Knows the workers' processes, forwards signals to them, and notes when each of them ended."""

    def __init__(self, rendezvous: Rendezvous, pids: Callable[[], list[int]], signals: list[int]) -> None:
        self._rendezvous, self._pids = rendezvous, pids
        self._done = threading.Event()
        self._forwarded: dict[int, int] = {}
        self.signals = signals
        """Signals that came, in order."""
        self.ended: dict[int, float] = {}
        """Process → time at which its end was seen (seconds since 1970)."""
        self.killed: set[int] = set()
        """Processes that were killed because they outlived another's failure."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the workers, and take SIGTERM and SIGINT, within the block.

        Signals in the main thread only, where Python allows it.
        """
        handlers: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                handlers[number] = signal.signal(number, self._on_signal)
        thread = threading.Thread(target=self._watch, name="forge-supervisor", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            for number, handler in handlers.items():
                signal.signal(number, handler)  # type: ignore[arg-type]

    def without_agent(self) -> "Supervisor":
        """Release the agent, so that it can be freed, and keep what was noted."""
        self._pids = list
        return self

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        if not self._pids():
            raise Interrupted

    def _watch(self) -> None:
        clock = AwakeClock()
        polls, since = -1, 0.0
        while not self._done.wait(_TICK_SECONDS):
            pids = self._pids()
            # One time for all that are found to have ended at once: which of them was first cannot be told.
            seen = time.time()
            alive = [pid for pid in pids if self._is_alive(pid, seen)]
            self._forward_signals(alive)
            now = clock.tick()
            if self._rendezvous.polls != polls or len(alive) == len(pids):
                polls, since = self._rendezvous.polls, now
            elif alive and now - since > AFTER_FAILURE_SECONDS:
                # Some ended, others live, and the agent is not in its loop any more: it waits for them after a failure.
                for pid in alive:
                    self.killed.add(pid)
                    with suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)

    def _is_alive(self, pid: int, seen: float) -> bool:
        if pid in self.ended:
            return False
        try:
            # WNOWAIT: the agent reaps its children itself.
            if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
                return True
        except ChildProcessError:
            pass
        self.ended[pid] = seen
        return False

    def _forward_signals(self, alive: list[int]) -> None:
        """Send each living worker the next signal that it has not had."""
        received = list(self.signals)
        for pid in alive:
            for number in received[self._forwarded.get(pid, 0) :]:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)
                # Two equal signals at once would arrive as one, and the second has a meaning of its own.
                self._forwarded[pid] = self._forwarded.get(pid, 0) + 1
                break
