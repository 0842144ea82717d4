"""Supervisor of the workers: forwards signals, and kills what does not end by itself.

That is what does not obey a second signal, outlives another worker's failure, or stands still.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from forge_dist.launching._rendezvous import Rendezvous
from forge_dist.launching._signals import Interrupted, forwarded_as
from forge_dist.ranks._failure_report import SIGNALS_APART_SECONDS, note_signal
from forge_dist.watching._watch import TICK_SECONDS, AwakeClock, Stall, Watch, Watched

# How long the workers of a node may go on after one of them failed: what they still have to report is in their exceptions.
# torch's agent would wait 30 seconds for each, in which a worker that hangs in a collective does nothing.
AFTER_FAILURE_SECONDS = 5.0
AFTER_SECOND_SIGNAL_SECONDS = 4.0
"""How long workers may go on after a second signal: one that hangs in native code does not hear of it."""
_POLL_SECONDS = 0.05


class Supervisor:
    """Knows the workers' processes, forwards signals to them, and notes when each of them ended.

    Args:
        rendezvous: of this launcher.
        workers: returns this node's newest processes, with the files of their beats.
        signals: that came, in order.
        on_stall: is told of a rank that stands still, before it is killed.
        left_early: returns whether a rank that ended with status 0 did so before its work was done; then the others are killed,
            for the agent takes it for one that finished.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        workers: Callable[[], list[Watched]],
        signals: list[int],
        on_stall: Callable[[Stall], None],
        left_early: Callable[[Watched], bool],
    ) -> None:
        self._rendezvous, self._workers = rendezvous, workers
        self._on_stall, self._left_early = on_stall, left_early
        self._done = threading.Event()
        self._forwarded: dict[int, int] = {}
        self._forwarded_at: dict[int, float] = {}
        self._polls_at_end: dict[int, int] = {}
        self._early: dict[int, bool] = {}
        self.signals = signals
        """Signals that came, in order."""
        self.ended: dict[int, float] = {}
        """Process → time at which its end was seen (seconds since 1970)."""
        self.killed: set[int] = set()
        """Processes that were killed because they outlived another's failure."""
        self.stopped_at_once = False
        """Whether workers were killed because they did not obey a second signal."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the workers, and take the signals that ask for an end, within the block.

        Signals in the main thread only, where Python allows it. SIGUSR1, which Slurm's `--signal` is often told to send, is one
        of them unless the program has a handler of its own.
        """
        handlers: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                handlers[number] = signal.signal(number, self._on_signal)
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as `nohup` has it
                handlers[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._on_hang_up)
            if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, handlers[signal.SIGTERM]):  # else it has another meaning
                handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_hang_up)
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
        self._workers, self._on_stall, self._left_early = list, lambda _: None, lambda _: False
        return self

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        pids, seen = [worker.pid for worker in self._workers()], time.time()
        if not pids or (len(self.signals) > 1 and not any(self._is_alive(pid, seen) for pid in pids)):
            raise Interrupted

    def _on_hang_up(self, number: int, frame: FrameType | None) -> None:
        """Take the first SIGHUP or SIGUSR1; a later one asks for no more.

        The shell and the kernel each send a SIGHUP.
        """
        if not self.signals:
            self._on_signal(number, frame)

    def _watch(self) -> None:
        clock, watch = AwakeClock(), Watch(alone=lambda: self._rendezvous.nodes < 2)
        polls, since, looked, second = -1, 0.0, 0.0, 0.0
        while not self._done.wait(_POLL_SECONDS):
            workers = self._workers()
            pids = [worker.pid for worker in workers]
            # One time for all that are found to have ended at once: which of them was first cannot be told.
            seen = time.time()
            alive = [pid for pid in pids if self._is_alive(pid, seen)]
            self._forward_signals([worker for worker in workers if worker.pid in alive])
            now = clock.tick()
            if len(self.signals) > 1:
                second = second or now
                if alive and now - second > AFTER_SECOND_SIGNAL_SECONDS:
                    self.stopped_at_once = True
                    self._kill(alive)
            if now - looked >= TICK_SECONDS and len(alive) == len(pids):
                looked = now
                self._heed(watch.look(workers))
            if self._rendezvous.polls != polls or len(alive) == len(pids):
                polls, since = self._rendezvous.polls, now
                self._end_after_early_leave(workers, alive, seen)
            elif alive and now - since > AFTER_FAILURE_SECONDS:
                # Some ended, others live, and the agent is not in its loop any more: it waits for them after a failure.
                self._kill(alive)

    def _end_after_early_leave(self, workers: list[Watched], alive: list[int], seen: float) -> None:
        """Kill workers that outlive one that left too early, with the status of one that finished."""
        for worker in workers:
            ended = self.ended.get(worker.pid)
            # The agent looks at its workers before each poll: by the second since the end it has taken that for a success.
            taken = self._polls_at_end.setdefault(worker.pid, self._rendezvous.polls) if ended is not None else 0
            if ended is None or self._rendezvous.polls < taken + 2:
                continue
            if worker.pid not in self._early:
                self._early[worker.pid] = self._left_early(worker)
            if self._early[worker.pid] and seen - ended > AFTER_FAILURE_SECONDS:
                self._kill(alive)

    def _kill(self, pids: list[int]) -> None:
        for pid in pids:
            self.killed.add(pid)
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)

    def _heed(self, found: str | Stall | None) -> None:
        """Say which rank has not moved for a while, or end the one that stands still."""
        if isinstance(found, Stall):
            self._on_stall(found)
            with suppress(ProcessLookupError):
                os.killpg(found.pid, signal.SIGKILL)
        elif found:
            with suppress(OSError, ValueError):
                sys.stderr.write(f"forge: {found}\n")
                sys.stderr.flush()

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

    def _forward_signals(self, alive: list[Watched]) -> None:
        """Send each living worker the next signal that it has not had, and note which one came."""
        received, now = list(self.signals), time.monotonic()
        for worker in alive:
            pid = worker.pid
            if now - self._forwarded_at.get(pid, -math.inf) < SIGNALS_APART_SECONDS:
                continue
            for number in received[self._forwarded.get(pid, 0) :]:
                note_signal(worker.board, number)
                with suppress(ProcessLookupError):
                    os.kill(pid, forwarded_as(number))
                # Two equal signals at once would arrive as one, and the second has a meaning of its own.
                self._forwarded[pid] = self._forwarded.get(pid, 0) + 1
                self._forwarded_at[pid] = now
                break
