"""Deferred SIGTERM and SIGINT while torch is imported: native imports swallow exceptions."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupted(BaseException):
    """A signal that came while there were no workers to forward it to."""


@contextmanager
def deferred_signals() -> Iterator[list[int]]:
    """Collect signals in the yielded list, and raise each again after the block.

    With its former handler.

    A KeyboardInterrupt inside an import that native code makes is lost: whoever asked for the end would wait for a whole run. A
    signal whose handler raises nothing stays in the list. Ignored signals stay ignored, and only the main thread takes signals.
    """
    received: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        received.append(number)

    handlers: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            # None: a handler from outside of Python, which could not be put back.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                handlers[number] = signal.signal(number, note)
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
    for number in received:
        signal.raise_signal(number)


def forwarded_as(number: int) -> int:
    """Return the signal that workers get for one that came to their launcher.

    SIGTERM for SIGHUP and SIGUSR1: any program takes it for a stop.
    """
    return signal.SIGTERM if number in (signal.SIGHUP, signal.SIGUSR1) else number
