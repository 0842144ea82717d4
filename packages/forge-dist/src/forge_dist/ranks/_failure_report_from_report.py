"""An exception in a worker → a file where its launcher reads it → the same exception in the launcher."""

import faulthandler
import importlib
import json
import os
import re
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from forge_dist._errors import ForgeDistError, WorkerError
from forge_dist._files import write_text_atomically
from forge_dist.ranks._failure_report import leave_with_launcher

# EX_TEMPFAIL of sysexits.h: come again, and the run goes on.
PREEMPTED = 75
# torchrun's variable for the file that it reads when a worker failed; ours keep torch's format and add a part of their own.
REPORT = "TORCHELASTIC_ERROR_FILE"
# Set by this package's launcher to its process id.
LAUNCHER = "FORGE_LAUNCHER_PID"

# What a collective says when a rank at the other end is gone: the message follows from another rank's failure.
_LOST = re.compile(
    r"connection (closed by peer|reset by peer|refused|was aborted)|broken pipe|gloo|socket|timed out .*(store|waiting)"
    r"|remote process exited",
    re.IGNORECASE,
)

_active = False


@contextmanager
def worker_report() -> Iterator[None]:
    """Around a worker's main: an exception is written where its launcher reads it, and goes on as it is.

    Under a launcher of this package `SystemExit(75)` becomes a mark and an ordinary end, because the agent would take any other status
    for a failure; `launch` returns the 75. Also from here on the worker ends within seconds of its launcher's death. Inside another
    one it does nothing.
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
    # A crash in native code has no exception; its stack goes to the rank's log.
    with suppress(RuntimeError, ValueError, OSError):
        faulthandler.enable()
    ours = os.environ.get(LAUNCHER)
    if ours:
        leave_with_launcher(int(ours))
    try:
        yield
    except SystemExit as error:
        status = exit_status_of(error)
        if status == PREEMPTED and ours:
            write_report({"preempted": True, "time": time.time()})
            raise SystemExit(0) from None
        if status not in (0, PREEMPTED):
            write_report(describe(error))
        raise
    except BaseException as error:
        write_report(describe(error))
        raise


def exit_status_of(error: SystemExit) -> int:
    """The status with which Python leaves for a SystemExit: none is 0, text is 1."""
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def describe(error: BaseException, *, rank: int | None = None, host: str | None = None) -> dict[str, Any]:
    """What is known of a failure, as JSON: class, message, where, when (seconds since 1970), and whether another rank's end caused it."""
    status = exit_status_of(error) if isinstance(error, SystemExit) else getattr(error, "exit_status", None)
    return {
        "module": type(error).__module__,
        "class": type(error).__qualname__,
        "text": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "exit_status": status if isinstance(status, int) else None,
        "rank": int(os.environ.get("RANK", "0")) if rank is None else rank,
        "host": host or socket.gethostname(),
        "time": time.time(),
        "consequence": _is_consequence(error),
    }


def _is_consequence(error: BaseException) -> bool:
    if isinstance(error, WorkerError):
        # A worker says this of another rank only.
        return True
    if isinstance(error, ForgeDistError):
        return False
    names = {kind.__name__ for kind in type(error).__mro__}
    return "DistError" in names or (isinstance(error, RuntimeError | OSError) and _LOST.search(str(error)) is not None)


def write_report(report: Mapping[str, Any]) -> None:
    """Write to the launcher's file, atomically; without a launcher, or where the disk takes no more, do nothing."""
    path = os.environ.get(REPORT)
    if not path:
        return
    stamp = str(int(report["time"]))
    text = {
        "message": {
            "message": f"{report.get('class', '')}: {report.get('text', '')}",
            "extraInfo": {"py_callstack": report.get("traceback", ""), "timestamp": stamp},
        },
        "forge": dict(report),
    }
    try:
        write_text_atomically(path, json.dumps(text))
    except ForgeDistError as error:
        # The rank's log is all there is.
        sys.stderr.write(f"the report of this failure cannot be written: {error}\n")


def read_report(path: Path) -> dict[str, Any] | None:
    """What a worker wrote, or None where it wrote nothing that can be read."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))["forge"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return report if isinstance(report, dict) else None


def rebuild(report: Mapping[str, Any]) -> Exception:
    """The exception that a worker reported, its message ending in its rank and host, the worker's traceback as a note.

    The class is looked up by module and name. One that is no Exception, or that cannot be made from one text, becomes a WorkerError that
    names it; so does SystemExit, with the worker's own status as its `exit_status`.
    """
    where = f"rank {report['rank']} on {report['host']}"
    kind = _class_of(report)
    made: Exception | None = None
    if kind is not None:
        with suppress(Exception):
            made = kind(f"{report['text']} ({where})")
    if made is None:
        if report["class"] == "SystemExit":
            made = WorkerError(f"{where} left with exit status {report['exit_status']}")
        else:
            made = WorkerError(f"{where} ended: {report['class']}: {report['text']}")
    status = report.get("exit_status")
    if status is not None and status != getattr(made, "exit_status", None):
        with suppress(AttributeError):
            made.exit_status = status  # type: ignore[attr-defined]
    made.add_note(f"{where} said:\n{str(report['traceback']).rstrip()}")
    return made


def _class_of(report: Mapping[str, Any]) -> type[Exception] | None:
    try:
        found: Any = importlib.import_module(report["module"])
        for part in report["class"].split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        return None
    return found if isinstance(found, type) and issubclass(found, Exception) else None
