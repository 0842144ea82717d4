"""Root cause of a failed run: the failure that the others follow from, on any node."""

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

import attrs

from forge_dist._errors import StallError, WorkerError
from forge_dist.ranks._failure_report import rebuild_exception
from forge_dist.ranks._messages import Messages
from forge_dist.ranks._network import unreachable
from forge_dist.ranks._store import publish_failure, published_failure

if TYPE_CHECKING:
    from forge_dist.launching._rendezvous import Rendezvous
    from forge_dist.watching._watch import Stall

# Lines of a rank's log that are quoted where it left no report.
_QUOTED_LINES = 8

# How long a launcher looks for the cause on other nodes, and how long the store's host stays up for those that look.
_SEARCH_SECONDS = 5.0
_RETRY_SECONDS = 0.1


@attrs.frozen(kw_only=True)
class Failure:
    """One worker that failed."""

    rank: int
    """Rank of the worker."""
    host: str
    """Name of its host."""
    exitcode: int
    """Exit status; negative: the signal that ended it."""
    ended: float
    """Time at which its end was seen, in seconds since 1970."""
    report: Mapping[str, Any] | None
    """The report that it wrote, if any (`failure_report`)."""
    log: Path
    """Its log file."""

    killed_by_launcher: bool = False
    """Whether this package's launcher killed it, because it outlived another's failure."""

    @property
    def failed_at(self) -> float:
        """Time at which it is known to have failed, in seconds since 1970."""
        return self.ended if self.report is None else min(self.report["time"], self.ended)


def root_cause(failures: list[Failure]) -> Failure:
    """Return the failure that the others follow from.

    First in time, but an exception of its own, or a death, comes before an exception that follows from another rank's end; last
    come those that were ended because another had failed. torch's agent does that with SIGTERM, which an outsider may send too:
    to be the agent's, another worker must have ended before, or at the same time in another way.
    """
    first_end = min(failure.ended for failure in failures)
    others = {failure.ended for failure in failures if failure.exitcode != -signal.SIGTERM}

    def order(failure: Failure) -> tuple[int, float]:
        if failure.report is not None:
            return int(bool(failure.report["consequence"])), failure.failed_at
        by_agent = failure.exitcode == -signal.SIGTERM and (failure.ended > first_end or failure.ended in others)
        return (2 if failure.killed_by_launcher or by_agent else 0), failure.failed_at

    return min(failures, key=order)


def report_of(failure: Failure) -> dict[str, Any]:
    """Return the worker's own report, or one made of its exit status and the end of its log."""
    if failure.report is not None:
        return dict(failure.report)
    where = f"rank {failure.rank} on {failure.host}"
    if failure.exitcode < 0:
        name = _signal_name(-failure.exitcode)
        why = "; out of memory?" if failure.exitcode == -signal.SIGKILL else ""
        text = f"{where} was killed by {name}{why}"
    else:
        text = f"{where} ended with exit status {failure.exitcode} and left no report of why"
        if not failure.exitcode:
            text = f"{where} ended with exit status 0 before its work was done (os._exit(0), or a library that calls it?)"
    end = _last_lines(failure.log)
    return {
        "module": WorkerError.__module__,
        "class": WorkerError.__qualname__,
        "text": f"{text}; its log: {failure.log}" + (f"\nThe log ends with:\n{end}" if end else ""),
        "traceback": "",
        "exit_status": None,
        "rank": failure.rank,
        "host": failure.host,
        "time": failure.ended,
        "consequence": False,
        "complete": True,
    }


def error_of(report: Mapping[str, Any], families: Sequence[type[Exception]] = ()) -> Exception:
    """Return the exception to raise in the launcher; of which classes, see `rebuild_exception`."""
    if report.get("complete"):
        return (StallError if report["class"] == StallError.__name__ else WorkerError)(report["text"])
    return rebuild_exception(report, families)


def stall_report(stall: "Stall", kept: str, host: str) -> dict[str, Any]:
    """Return the report of a rank that stands still and is about to be killed."""
    name = f"rank {stall.rank}"
    text = stall.text.replace(name, f"{name} on {host}", 1)
    return {
        "module": StallError.__module__,
        "class": StallError.__qualname__,
        "text": f"{text}. {kept}".rstrip(),
        "traceback": "",
        "exit_status": StallError.exit_status,
        "rank": stall.rank,
        "host": host,
        "time": time.time(),
        "consequence": False,
        "complete": True,
    }


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
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-_QUOTED_LINES:])
    except OSError:
        return ""


def root_cause_on_all_nodes(rendezvous: "Rendezvous", report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Publish `report` to the other nodes, or look there for the failure that it follows from.

    Returns `report` itself where the others published nothing, or cannot be reached.
    """
    known = report.get("cause")
    if known:
        report = known
    if rendezvous.nodes < 2 or rendezvous.store_address is None:
        return report
    found: list[Mapping[str, Any]] = []

    def search() -> None:
        try:
            found.append(_exchange_causes(rendezvous, report))
        except RuntimeError:
            return

    # In a thread, because a call over a cut link may never return.
    thread = Thread(target=search, daemon=True)
    thread.start()
    thread.join(3 * _SEARCH_SECONDS)
    return found[0] if found else report


def publish_at_once(rendezvous: "Rendezvous", report: Mapping[str, Any]) -> None:
    """Tell the other nodes why this one ends, before its workers are gone."""
    if rendezvous.nodes > 1 and rendezvous.store_address is not None:
        with suppress(RuntimeError):
            publish_failure(_store_of(rendezvous), report)


def _store_of(rendezvous: "Rendezvous") -> Messages:
    # Imported here: a launcher reads this file before it takes signals, and torch takes seconds.
    from torch.distributed import TCPStore

    assert rendezvous.store_address is not None
    host, port = rendezvous.store_address
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_SEARCH_SECONDS))
    return Messages(client, rendezvous.secret, f"forge/{rendezvous.round}")


def _exchange_causes(rendezvous: "Rendezvous", report: Mapping[str, Any]) -> Mapping[str, Any]:
    assert rendezvous.store_address is not None
    if unreachable(*rendezvous.store_address, _RETRY_SECONDS):
        return report
    store = _store_of(rendezvous)
    publish_failure(store, report)
    found = published_failure(store)
    if report["consequence"]:
        _wait_until(lambda: published_failure(store) is not None)
        found = published_failure(store)
    store.count("heard")
    if rendezvous.node_rank == 0:
        # This launcher may host the store: it stays until the other nodes have read it.
        _wait_until(lambda: store.count("heard", 0) >= rendezvous.nodes)
    return report if found is None else found


def _wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _SEARCH_SECONDS
    while not done() and time.monotonic() < end:
        time.sleep(_RETRY_SECONDS)
