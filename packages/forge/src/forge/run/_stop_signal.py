"""SIGTERM or SIGINT → a flag that the run reads between two steps."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import suppress
from types import FrameType, TracebackType
from typing import Any, Self

import forge_dist

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignal:
    """Handler that notes the first signal in `received`; a second one does what it did before.

    Active inside its `with` block. Python delivers signals to its main thread alone: in any other nothing changes.
    """

    def __init__(self) -> None:
        self.received: str | None = None
        """Name of the signal that came, or None."""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._receive) for number in _SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        self.received = signal.Signals(number).name
        self._restore()
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
