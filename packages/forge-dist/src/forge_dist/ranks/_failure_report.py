"""Report of a worker's exception: a file from which its launcher rebuilds the exception."""

import builtins
import ctypes
import faulthandler
import json
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forge_dist._errors import ForgeDistError, StallError, WorkerError
from forge_dist._files import write_text_atomically

# EX_TEMPFAIL of sysexits.h: start the command again and the run goes on.
PREEMPTED = 75
# torchrun's variable for the file that it reads after a worker failed. Ours keeps torch's format and adds a part of its own.
REPORT = "TORCHELASTIC_ERROR_FILE"
# Set by this package's launcher to its process id.
LAUNCHER = "FORGE_LAUNCHER_PID"
# Set by it too: the file of a worker's beats, which it reads.
BEATS = "FORGE_BEATS"

SIGNALS_APART_SECONDS = 2.0
"""Least time between two signals that a launcher forwards to a rank."""
_SAME_SIGNAL_SECONDS = 1.5
_SIGNAL = ".signal"
"""Suffix of the file, beside a worker's beats, with the number of the signal that came to its launcher."""
_POLL_SECONDS = 0.5
_PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal that a process gets when its parent dies."""
_STATUSES = range(1, 256)
"""Exit statuses of a process that failed."""

# What a collective raises when the rank at the other end is gone: the message follows from another rank's failure.
_PEER_GONE = re.compile(
    r"connection (closed by peer|reset by peer|refused|was aborted)|broken pipe|gloo|socket|timed out .*(store|waiting)"
    r"|remote process exited",
    re.IGNORECASE,
)

_active = False


@contextmanager
def worker_report() -> Iterator[None]:
    """Report an exception of the enclosed worker code to its launcher, and re-raise it.

    Under a launcher of this package `SystemExit(75)` is recorded as a preemption and the process exits with status 0, because
    torch's agent would take any other status for a failure; `launch` then returns 75. A process that ends with status 0 within
    the block, as by `os._exit(0)`, has failed. From here on the worker also ends within seconds of its launcher's death. Nested
    calls do nothing.
    """
    global _active  # noqa: PLW0603 - one process has one report
    if _active:
        yield
        return
    _active = True
    try:
        with _reporting():
            yield
    finally:
        _active = False


@contextmanager
def _reporting() -> Iterator[None]:
    # A crash in native code raises no exception; its stack goes to the rank's log.
    with suppress(RuntimeError, ValueError, OSError):
        faulthandler.enable()
    launcher = os.environ.get(LAUNCHER)
    if launcher:
        exit_with_launcher(int(launcher))
        write_report({"unfinished": os.getpid(), "time": time.time()})
    try:
        yield
        _forget_unfinished(launcher)
    except SystemExit as error:
        status = exit_status_of(error)
        _forget_unfinished(launcher)
        if status == PREEMPTED and launcher:
            write_report({"preempted": True, "time": time.time()})
            raise SystemExit(0) from None
        if status not in (0, PREEMPTED):
            write_report(failure_report(error))
        raise
    except BaseException as error:
        write_report(failure_report(error))
        raise


def _forget_unfinished(launcher: str | None) -> None:
    """Remove the mark of unfinished work, by which a launcher tells `os._exit(0)` from an end.

    Removed, because a full disk allows that.
    """
    if launcher and os.environ.get(REPORT):
        with suppress(OSError):
            Path(os.environ[REPORT]).unlink()


def beats_of_launcher() -> Path | None:
    """Return the file of beats that this package's launcher reads; None without one."""
    file, launcher = os.environ.get(BEATS), os.environ.get(LAUNCHER)
    return Path(file) if file and launcher == str(os.getppid()) else None


def same_signal_seconds() -> float:
    """Return seconds within which a second signal is the first one once more.

    It is 0 without a launcher.
    Slurm and systemd signal every process of a job, the ranks too, to which this package's launcher or torchrun forwards its
    own.
    """
    launched = os.environ.get(LAUNCHER) == str(os.getppid()) or "TORCHELASTIC_RUN_ID" in os.environ
    return _SAME_SIGNAL_SECONDS if launched else 0.0


def note_signal(beats: Path, number: int) -> None:
    """Write beside a worker's beats which signal came to its launcher, before it is forwarded."""
    with suppress(OSError):  # on a full disk the forwarded signal is named
        beats.with_suffix(_SIGNAL).write_text(str(int(number)))


def signal_that_came(number: int) -> int:
    """Return the signal that the launcher got and forwarded as `number`.

    Without a launcher of this package it is `number` itself.
    """
    beats = beats_of_launcher()
    if beats is None:
        return number
    try:
        return int(beats.with_suffix(_SIGNAL).read_text())
    except (OSError, ValueError):
        return number


def exit_status_of(error: SystemExit) -> int:
    """Return the status with which Python exits for a SystemExit: 0 without a code, 1 for text."""
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def failure_report(error: BaseException, *, rank: int | None = None, host: str | None = None) -> dict[str, Any]:
    """Describe a failure as JSON: class, message, place, time (seconds since 1970), consequence.

    `consequence` says whether another rank's end caused it, and `cause`, where that is known, is the report of it.
    """
    status = exit_status_of(error) if isinstance(error, SystemExit) else getattr(error, "exit_status", None)
    cause = error.cause if isinstance(error, WorkerError) else None
    return {
        "module": type(error).__module__,
        "class": type(error).__qualname__,
        "text": _exit_of(error) if isinstance(error, SystemExit) else str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "exit_status": status if isinstance(status, int) else None,
        "rank": int(os.environ.get("RANK", "0")) if rank is None else rank,
        "host": host or socket.gethostname(),
        "time": time.time(),
        "consequence": follows_from_peer(error),
        **({} if cause is None else {"cause": cause}),
    }


def _exit_of(error: SystemExit) -> str:
    """Say what ended a process, and where that stands."""
    made = f"sys.exit({'' if error.code is None else repr(error.code)})"
    trace = traceback.extract_tb(error.__traceback__)
    return f"{made} at {trace[-1].filename}:{trace[-1].lineno}" if trace else made


def follows_from_peer(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone."""
    if isinstance(error, WorkerError):
        # A worker raises this about another rank only, but for a stall of its own.
        return not isinstance(error, StallError)
    if isinstance(error, ForgeDistError):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or (isinstance(error, RuntimeError | OSError) and _PEER_GONE.search(str(error)) is not None)


def write_report(report: Mapping[str, Any], path: Path | None = None) -> None:
    """Write the launcher's report file; without a launcher, or on a full disk, do nothing.

    `path` is another process's, for a launcher that writes it in its place.
    """
    path = path or (Path(os.environ[REPORT]) if os.environ.get(REPORT) else None)
    if path is None:
        return
    stamp = str(int(report["time"]))
    message = f"{report.get('class', '')}: {report.get('text', '')}"
    # torchrun prints this part as the traceback: bad input needs none.
    bad_input = report.get("exit_status") == ForgeDistError.exit_status
    stack = message if bad_input else report.get("traceback", "")
    text = {
        "message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": stamp}},
        "forge": dict(report),
    }
    try:
        write_text_atomically(path, json.dumps(text))
    except ForgeDistError as error:
        # The rank's log is all there is.
        sys.stderr.write(f"the report of this failure cannot be written: {error}\n")


def read_report(path: Path) -> dict[str, Any] | None:
    """Return what a worker wrote, or None where there is no readable report."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))["forge"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if isinstance(report, dict) else None


def rebuild_exception(report: Mapping[str, Any], families: Sequence[type[Exception]] = ()) -> Exception:
    """Rebuild the exception that a worker reported, with its rank, host and traceback.

    The message ends in the rank and the host; the worker's traceback is a note. Only classes that this process knows are made,
    for a report may come over a network: Python's own, this package's, and those of `families`, with their subclasses. Any
    other, one that is no Exception, or that cannot be made from one text, becomes a WorkerError that names it; so does
    SystemExit, with the worker's own status as its `exit_status`, which is never 0.
    """
    where = f"rank {report['rank']} on {report['host']}"
    kind = _known(families).get((str(report["module"]), str(report["class"])))
    error: Exception | None = None
    if kind is not None:
        with suppress(Exception):
            error = kind(f"{report['text']} ({where})")
    status = report.get("exit_status")
    if isinstance(status, bool) or not isinstance(status, int) or status not in _STATUSES:
        status = None
    if error is None:
        if report["class"] == "SystemExit":
            error = WorkerError(f"{where} left with exit status {status or 1}, by {report['text']}")
        else:
            error = WorkerError(f"{where} ended: {report['class']}: {report['text']}")
    if status is not None and status != getattr(error, "exit_status", None):
        with suppress(AttributeError):
            error.exit_status = status  # type: ignore[attr-defined]
    error.add_note(f"Traceback of {where}:\n{str(report['traceback']).rstrip()}")
    return error


def _known(families: Sequence[type[Exception]]) -> dict[tuple[str, str], type[Exception]]:
    """Return module and name → class, of all exceptions that a report may stand for."""
    known = {("builtins", name): found for name, found in vars(builtins).items() if _is_exception(found)}
    left = [ForgeDistError, *families]
    while left:
        kind = left.pop()
        known[kind.__module__, kind.__qualname__] = kind
        left += kind.__subclasses__()
    return known


def _is_exception(found: object) -> bool:
    return isinstance(found, type) and issubclass(found, Exception)


def exit_with_launcher(launcher: int) -> None:
    """End this process (status 1) soon after its parent process, the launcher, is gone.

    Nothing else would end it, and the next run would find it still writing. On Linux the kernel kills it: no thread of Python
    runs in a process that is stopped, or whose native code hangs with Python's lock, and it would hold the run's directory.
    """
    with suppress(OSError, AttributeError):  # no such function elsewhere
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Elsewhere, and for a launcher that was gone before.
    threading.Thread(target=_watch_launcher, args=(launcher,), name="forge-launcher-watch", daemon=True).start()


def _watch_launcher(launcher: int) -> None:
    # A process whose parent died gets another parent; asking for the parent has no race with a process id that is used again.
    while os.getppid() == launcher:
        time.sleep(_POLL_SECONDS)
    # The launcher read this process's output, so the line may reach nobody.
    try:
        os.write(2, f"forge: the launcher (process {launcher}) is gone, and this rank leaves\n".encode())
    except OSError:
        pass
    finally:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
        os._exit(1)
