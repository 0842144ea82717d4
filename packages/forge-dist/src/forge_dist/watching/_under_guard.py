"""This process → one with a guard beside it, which it tells of its signals and beats."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import FrameType

from forge_dist._errors import StallError
from forge_dist._temporary import temporary_folder
from forge_dist.watching._beats import close_beats, open_beats
from forge_dist.watching._guard import ANSWERED

# The exception of a stall is raised in the main thread by a signal of our own.
_RAISE = signal.SIGRTMIN + 10 if hasattr(signal, "SIGRTMIN") else None
# How long the main thread has to raise it, and then to leave what it was in.
_RAISE_SECONDS, _TIDY_SECONDS = 3.0, 12.0
_END_SECONDS = 5.0
# Exit status of a process that a second signal ended, as a shell has it.
_BY_SIGNAL = 128


@contextmanager
def under_guard(
    rank: int, world_size: int, log_dir: Path, timeout: float | None, leave: Callable[[BaseException], None]
) -> Iterator[None]:
    """Run the block under the eyes of a guard process.

    A stall raises StallError in the main thread; where that is too late for Python code, `leave` is called with the error and
    the process exits with status 1, or is killed. A second SIGTERM or SIGINT that does not end the process within seconds ends
    it with status 143 or 130, or kills it. Without a Python to start (an embedded one), or room for a small temporary
    file, nothing is watched.

    Args:
        rank: of this process.
        world_size: ranks of the run.
        log_dir: folder for the stacks of a stall; made when there is one.
        timeout: as `Beats` takes it.
        leave: called in another thread before the process is left.
    """
    with ExitStack() as stack:
        process = None
        with suppress(OSError):
            board = stack.enter_context(temporary_folder()) / "beats"
            open_beats(board, timeout)
            stack.callback(close_beats)
            process = _start(rank, world_size, board, log_dir)
        if process is not None:
            stack.enter_context(_listening(process, leave))
            stack.callback(_dismiss, process)
            stack.enter_context(_signals_told(process))
        yield


def _start(rank: int, world_size: int, board: Path, log_dir: Path) -> "subprocess.Popen[bytes] | None":
    command = [sys.executable, "-S", "-P", "-m", "forge_dist.watching._guard", *map(str, (os.getpid(), rank, world_size))]
    home = str(Path(__file__).resolve().parents[2])
    try:
        process = subprocess.Popen(  # noqa: S603 - this Python, and words of our own
            [*command, str(board), str(log_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": home},
            bufsize=0,
        )
    except (OSError, ValueError):
        return None
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    global _guard  # noqa: PLW0603 - a process has one guard
    _guard = process.stdin.fileno()
    return process


def _dismiss(process: "subprocess.Popen[bytes]") -> None:
    global _guard  # noqa: PLW0603 - a process has one guard
    assert process.stdin is not None
    dismiss_guard()
    _guard = -1
    process.stdin.close()


def dismiss_guard() -> None:
    """Tell the guard that this process has said why it ends, and leaves without more.

    Without a guard nothing happens.
    """
    if _guard >= 0:
        with suppress(OSError):
            os.write(_guard, b"\0")


_guard = -1
"""Descriptor of the guard's standard input."""


@contextmanager
def _signals_told(process: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Have each signal's number written to the guard as it arrives, also while native code runs.

    In the main thread only, and not where somebody else has signals written (an event loop).
    """
    assert process.stdin is not None
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    global _told  # noqa: PLW0603 - a process has one such descriptor
    told = process.stdin.fileno()
    before = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    if before >= 0:
        signal.set_wakeup_fd(before, warn_on_full_buffer=False)
        yield
        return
    _told = told
    _forget_in_children()
    try:
        yield
    finally:
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, told):
            signal.set_wakeup_fd(now)
        _told = -1


_told = -1


def signal_answered() -> None:
    """Tell the guard, from a signal's handler, that its sender has been answered.

    Without a guard nothing happens.
    """
    # Nothing that may wait: a handler runs between any two operations of its thread, which may hold any lock.
    if _told >= 0:
        with suppress(OSError):
            os.write(_told, bytes([ANSWERED]))


@cache
def _forget_in_children() -> None:
    """Keep processes that are forked from telling of their own signals."""

    def forget() -> None:
        with suppress(ValueError):
            found = signal.set_wakeup_fd(-1)
            if found not in (-1, _told):
                signal.set_wakeup_fd(found)

    os.register_at_fork(after_in_child=forget)


@contextmanager
def _listening(process: "subprocess.Popen[bytes]", leave: Callable[[BaseException], None]) -> Iterator[None]:
    """Obey what the guard asks for, in a thread; a stall raises in the main thread first."""
    assert process.stdout is not None
    main = threading.current_thread()
    over, raised = threading.Event(), threading.Event()
    asked: list[str] = []

    def raise_in_main(_number: int, _frame: FrameType | None) -> None:
        if asked and not over.is_set():
            raised.set()
            raise StallError(asked[0])

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            message = json.loads(line)
            if "second" in message:
                _leave(f"a second {message['second']}", _BY_SIGNAL + signal.Signals[message["second"]])
            asked.append(message["stall"])
            if handler is not None and _RAISE is not None and main.ident is not None:
                signal.pthread_kill(main.ident, _RAISE)
                raised.wait(_RAISE_SECONDS)
            if raised.is_set():
                over.wait(_TIDY_SECONDS)
            if not over.is_set():
                leave(StallError(asked[0]))
                _leave(asked[0], StallError.exit_status)

    handler: object = None
    if _RAISE is not None and main is threading.main_thread():
        handler = signal.signal(_RAISE, raise_in_main)
    thread = threading.Thread(target=listen, name="forge-guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        thread.join(1.0)
        process.stdout.close()
        if handler is not None and _RAISE is not None:
            signal.signal(_RAISE, handler)  # type: ignore[arg-type]


def _leave(text: str, status: int) -> None:
    """End this process without what the main thread would still do: it does not answer."""
    with suppress(OSError):
        os.write(2, f"forge: {text}\n".encode())
    os._exit(status)
