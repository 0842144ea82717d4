"""SIGTERM and SIGINT → noted while torch is imported, and then what they would have been: native imports swallow exceptions."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def signals_held() -> Iterator[list[int]]:
    """Note signals in the list that this gives; behind the `with` block each goes to whom it was for, whose exception is raised there.

    A KeyboardInterrupt inside an import that native code makes is lost: who asked for the end would wait for a whole run. A handler
    that raises nothing leaves its signal in the list. What was ignored stays so, and only the main thread takes signals.
    """
    came: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before: dict[int, object] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            # None: a handler from outside of Python, which could not be put back.
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                before[number] = signal.signal(number, note)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
    for number in came:
        signal.raise_signal(number)
