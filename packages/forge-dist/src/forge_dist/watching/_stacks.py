"""Stacks of all threads of a process, written on a signal, even out of native code."""

import faulthandler
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, NamedTuple

# A real-time signal, for programs and schedulers have uses of their own for the two that are free for all.
DUMP = signal.SIGRTMIN + 9 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2
_ANSWER_SECONDS = 3.0
_POLL_SECONDS = 0.05
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$', re.MULTILINE)
# Innermost frames among which a wait for other ranks shows.
_NEAREST = 8
_WAITING = ("/torch/distributed/", "/forge_dist/ranks/", "/deepspeed/comm/")

_file: BinaryIO | None = None


def stacks_of(board: Path) -> Path:
    """Return the file of the stacks that belongs to a rank's file."""
    return board.with_name(f"{board.name}.stacks")


def traces_of(board: Path) -> Path:
    """Return the prefix of the files with a rank's last collectives, if they are recorded."""
    return board.with_name(f"{board.name}.collectives_")


def dump_on_signal(board: Path) -> None:
    """Write the stacks of all threads beside `board` whenever the signal comes."""
    global _file  # noqa: PLW0603 - one process has one handler
    with suppress(OSError, ValueError, RuntimeError):
        stop_dumping()
        _file = stacks_of(board).open("ab", buffering=0)
        faulthandler.register(DUMP, file=_file, all_threads=True)


def stop_dumping() -> None:
    """Take the handler back."""
    global _file  # noqa: PLW0603 - one process has one handler
    if _file is not None:
        faulthandler.unregister(DUMP)
        _file.close()
        _file = None


def dump_now() -> None:
    """Write the stacks of this process's threads, from a thread that found it hanging."""
    if _file is not None:
        with suppress(OSError, ValueError):
            faulthandler.dump_traceback(_file, all_threads=True)


def request(processes: Sequence[tuple[int, Path]]) -> None:
    """Have processes write their stacks, and wait a few seconds for them.

    A stopped one goes on for it; who calls this ends it afterwards.

    Args:
        processes: of each the number and its `Board` file.
    """
    for pid, board in processes:
        for number in (DUMP, signal.SIGCONT):
            with suppress(OSError):
                os.kill(pid, number)
        for pipe in board.parent.glob(f"{traces_of(board).name}*.pipe"):
            # torch's flight recorder reads it. Never wait for a reader that is gone.
            with suppress(OSError):
                descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                os.write(descriptor, b"1\n")
                os.close(descriptor)
    end = time.monotonic() + _ANSWER_SECONDS
    sizes: list[int] = []
    while time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
        before, sizes = sizes, [_size(stacks_of(board)) for _, board in processes]
        if all(sizes) and sizes == before:
            return


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0


class Place(NamedTuple):
    """Where the main thread of a process is."""

    where: str
    """FILE:LINE in FUNCTION, of the innermost frame of Python."""
    waits: bool
    """Whether it waits for other ranks."""


def place_in(stacks: Path) -> Place | None:
    """Read where the main thread is; None where the process wrote nothing."""
    try:
        text = stacks.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # faulthandler writes the main thread last, being the oldest. The one that it calls the current one took the signal: in a
    # process that was stopped that may be any.
    rest = text.rpartition("hread 0x")[2]
    frames = list(_FRAME.finditer(rest.partition("\n\n")[0]))
    if not frames:
        return None
    inner = frames[0]
    near = frames[:_NEAREST]
    waits = any(part in each["file"].replace("\\", "/") for each in near for part in _WAITING)
    return Place(f"{_short(inner['file'])}:{inner['line']} in {inner['name']}", waits)


def _short(file: str) -> str:
    """Return a path below the folder of packages that it lies in."""
    for folder in sorted((os.path.abspath(entry) for entry in sys.path if entry), key=len, reverse=True):
        if file.startswith(folder + os.sep):
            return file[len(folder) + 1 :]
    return file
