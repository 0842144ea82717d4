"""Calls of a user's functions beside the run: in threads, awaited, and within a time limit."""

import asyncio
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any


class Call:
    """One call in a thread of its own; a coroutine is run to its end there.

    A thread cannot be stopped: one that is given up goes on, and does not hold the process when it ends.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.future: Future[Any] = Future()
        self._function = function
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.future.set_result(finished(self._function()))
        except BaseException as error:  # noqa: BLE001 - whatever a user's function may raise, SystemExit too
            self.future.set_exception(error)

    def stands_at(self, file: str) -> int | None:
        """Return the line of `file` at which the call stands; None where it is elsewhere."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        lines = [at.lineno for at in traceback.extract_stack(frame) if at.filename == file] if frame else []
        return lines[-1] if lines else None


def finished(value: Any) -> Any:
    """Return what an awaitable gives, or the value itself."""
    return asyncio.run(_await(value)) if inspect.isawaitable(value) else value


async def _await(value: Awaitable[Any]) -> Any:
    return await value
