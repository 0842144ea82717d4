"""Failed workers of one node → the exception that says what went wrong first, and on which rank."""

import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from forge_dist._errors import WorkerError
from forge_dist.ranks._failure_report_from_report import rebuild

# Lines of a rank's log that are quoted where it left no report.
_QUOTED = 8


@attrs.frozen(kw_only=True)
class Failure:
    """One worker that ended badly."""

    rank: int
    host: str
    exitcode: int
    """Negative: the signal that ended it."""
    ended: float
    """When its end was seen, seconds since 1970."""
    report: Mapping[str, Any] | None
    log: Path

    stopped: bool = False
    """Whether this package's launcher killed it, because it outlived another's failure."""

    @property
    def spoke(self) -> float:
        """When it is known to have failed, seconds since 1970."""
        return self.ended if self.report is None else min(self.report["time"], self.ended)


def cause_of(failures: list[Failure]) -> Failure:
    """The failure that the others follow from.

    First in time, but an exception of one's own, or a death, comes before an exception that follows from another rank's end; and last come
    those that were ended because another had failed. torch's agent does that with SIGTERM, which an outsider may send too: to be the
    agent's, somebody must have ended before.
    """
    first_end = min(failure.ended for failure in failures)

    def order(failure: Failure) -> tuple[int, float]:
        if failure.report is not None:
            return int(bool(failure.report["consequence"])), failure.spoke
        asked = failure.exitcode == -signal.SIGTERM and failure.ended > first_end
        return (2 if failure.stopped or asked else 0), failure.spoke

    return min(failures, key=order)


def description(failure: Failure) -> dict[str, Any]:
    """The failure as a report: the worker's own, or what can be said of one that left none."""
    if failure.report is not None:
        return dict(failure.report)
    where = f"rank {failure.rank} on {failure.host}"
    if failure.exitcode < 0:
        name = _signal_name(-failure.exitcode)
        why = "; out of memory?" if failure.exitcode == -signal.SIGKILL else ""
        text = f"{where} was killed by {name}{why}"
    else:
        text = f"{where} ended with exit status {failure.exitcode} and said nothing of why"
    return {
        "module": WorkerError.__module__,
        "class": WorkerError.__qualname__,
        "text": f"{text}; its log: {failure.log}",
        "traceback": _last_lines(failure.log),
        "exit_status": None,
        "rank": failure.rank,
        "host": failure.host,
        "time": failure.ended,
        "consequence": False,
        "complete": True,
    }


def error_of(report: Mapping[str, Any]) -> Exception:
    """The exception to raise in the launcher."""
    if report.get("complete"):
        error = WorkerError(report["text"])
        if report["traceback"]:
            error.add_note(f"the log ends with:\n{report['traceback']}")
        return error
    return rebuild(report)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _last_lines(log: Path) -> str:
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 4096))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-_QUOTED:])
    except OSError:
        return ""
