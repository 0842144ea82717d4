"""SIGTERM, SIGINT, SIGHUP or SIGUSR1 → a flag that the run reads between two steps."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import Any, Self

import forge_dist

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
"""SIGHUP comes where the terminal is closed or its connection lost, SIGUSR1 where Slurm's `--signal` is told to send it."""
_ONCE = (signal.SIGHUP, signal.SIGUSR1)

_lost: list[KeyboardInterrupt] = []


@contextmanager
def lost_interrupts() -> Iterator[None]:
    """Keep a KeyboardInterrupt that Python drops inside the block, for `raise_lost`.

    One that is raised in a `__del__` or in a callback of native code (numba's compiler has many) ends nothing: Python prints it
    and goes on, with a whole run that somebody asked to end.
    """
    before = sys.unraisablehook

    def keep(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            _lost.append(unraisable.exc_value)
        else:
            before(unraisable)

    sys.unraisablehook = keep
    try:
        yield
    finally:
        sys.unraisablehook = before
        _lost.clear()


def raise_lost() -> None:
    """Raise what `lost_interrupts` kept: called between the phases before the first step."""
    if _lost:
        # Anew: the traceback of the lost one holds what was being deleted.
        raise type(_lost[0])(*_lost[0].args)


def _asks_for_the_end(number: signal.Signals) -> bool:
    """Return whether a signal has no other meaning here."""
    handler = signal.getsignal(number)
    if number == signal.SIGHUP:
        return handler != signal.SIG_IGN
    return number != signal.SIGUSR1 or handler in (signal.SIG_DFL, signal.getsignal(signal.SIGTERM))


class StopSignal:
    """Handler that notes the first signal in `received`; a second one does what it did before.

    Not a second SIGHUP (the shell and the kernel each send one) or SIGUSR1. Where SIGHUP is ignored (`nohup`) it stays so, and
    SIGUSR1 is left to a handler that the program has for it. Of a rank that a launcher started, a second signal just after the
    first is the same one. Active inside its `with` block. Python delivers signals to its main thread alone: in any other
    nothing changes.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that came, or None."""
        self._before: dict[signal.Signals, Any] = {}
        self._until = 0.0

    def __enter__(self) -> Self:
        raise_lost()
        if threading.current_thread() is threading.main_thread():
            taken = [number for number in _SIGNALS if _asks_for_the_end(number)]
            self._before = {number: signal.signal(number, self._receive) for number in taken}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def settle(self) -> None:
        """Ignore further signals inside the block: the state is saved, and the run ends."""
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                self._before.setdefault(number, signal.getsignal(number))
                signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if self.received is not None:
            if time.monotonic() > self._until:
                self._restore()
                signal.raise_signal(number)
            return
        self.received = signal.Signals(forge_dist.signal_that_came(number)).name
        same = forge_dist.same_signal_seconds()
        self._until = time.monotonic() + same
        once = {number: self._before.pop(number) for number in _ONCE if number in self._before}
        if not same:
            self._restore()
        self._before |= once
        for ignored in once:
            signal.signal(ignored, signal.SIG_IGN)
        # Not `print`: the step may hold the lock of stderr, or be within a `print` of its own, which would be an error.
        began = "\n" if os.isatty(2) else ""  # the terminal has shown ^C, or a bar, on this line
        said = "this step is finished and its state saved, then the run ends; a second signal ends it at once."
        with suppress(OSError):
            os.write(2, f"{began}forge: {self.received}: {said}\n".encode())
        forge_dist.signal_answered()

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
