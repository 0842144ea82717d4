"""A failure on this node → the failure that it follows from, maybe on another node, asked and told at the store that all share."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from threading import Thread
from typing import Any

from torch.distributed import PrefixStore, Store, TCPStore

from forge_dist.launching._rendezvous import Meeting
from forge_dist.ranks._network import unreachable
from forge_dist.ranks._store import publish_failure, published_failure

# How long a launcher looks for the cause elsewhere, and how long the store's host stays for those that look.
_LOOK_SECONDS = 5.0
_RETRY_SECONDS = 0.1


def shared_cause(meeting: Meeting, report: Mapping[str, Any]) -> Mapping[str, Any]:
    """Tell the other nodes of `report`, or, where it is only a consequence, find out from them what it follows from.

    Returns `report` itself where the others say nothing, or cannot be reached.
    """
    known = report.get("cause")
    if known:
        report = known
    if meeting.nodes < 2 or meeting.place is None:
        return report
    found: list[Mapping[str, Any]] = []

    def ask() -> None:
        try:
            found.append(_ask(meeting, report))
        except RuntimeError:
            return

    # In a thread, because a call over a cut link may never return.
    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(3 * _LOOK_SECONDS)
    return found[0] if found else report


def _ask(meeting: Meeting, report: Mapping[str, Any]) -> Mapping[str, Any]:
    assert meeting.place is not None
    host, port = meeting.place
    if unreachable(host, port, _RETRY_SECONDS):
        return report
    client = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_LOOK_SECONDS))
    store: Store = PrefixStore(f"forge/{meeting.round}", client)
    publish_failure(store, report)
    found = published_failure(store)
    if report["consequence"]:
        _until(lambda: store.check(["failed"]))
        found = published_failure(store)
    store.add("heard", 1)
    if meeting.node_rank == 0:
        # This launcher may host the store: it stays until the others have heard.
        _until(lambda: store.add("heard", 0) >= meeting.nodes)
    return report if found is None else found


def _until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _LOOK_SECONDS
    while not done() and time.monotonic() < end:
        time.sleep(_RETRY_SECONDS)
