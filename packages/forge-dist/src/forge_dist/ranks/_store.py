"""Key-value store that all ranks of one start share, before any process group exists."""

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from forge_dist._errors import MeetingError
from forge_dist.environment._topology import Topology
from forge_dist.ranks._network import unreachable

if TYPE_CHECKING:
    import torch.distributed as dist

# Set by this package's launcher: differs between two starts of the same ranks, which share one store.
ROUND = "FORGE_ROUND"


def connect_store(topology: Topology, *, second: bool = False) -> "dist.Store":
    """Connect to the store of this start's ranks.

    Rank 0 hosts it unless the launcher does (torchrun's TORCHELASTIC_USE_AGENT_STORE).

    Args:
        topology: a worker's.
        second: open another connection to a store that exists already. A connection is held by one call at a time, and a call
            that waits must not block the heartbeat.

    Raises:
        MeetingError: nothing answers at that address.
    """
    import torch.distributed as dist

    assert topology.master is not None
    host, port = topology.master
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    seconds = topology.connect_seconds
    hosts = topology.rank == 0 and not hosted and not second
    why = "" if hosts else unreachable(host, port, seconds)
    store: dist.Store | None = None
    if not why:
        timeout = timedelta(seconds=max(seconds, 1.0))
        try:
            store = dist.TCPStore(host, port, is_master=hosts, wait_for_workers=False, timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as error:
            why = first_line(error)
    if store is None:
        raise MeetingError(
            f"rank {topology.rank} did not reach the ranks' meeting place {host}:{port} within {seconds:g} s ({why}): check "
            "that node 0 is up, that MASTER_ADDR and MASTER_PORT are its own, and that no firewall closes the port"
        )
    # The ranks that failed before are another round, whose keys must not be read.
    start = os.environ.get(ROUND) or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return dist.PrefixStore(f"forge/{start}", store)


# The key of the first failure of a start, and for how long a rank that fails tries to publish it.
_FAILED = "failed"
_PUBLISH_SECONDS = 3.0


def publish_failure(store: "dist.Store", report: Mapping[str, Any]) -> None:
    """Publish why this rank ends to all ranks and launchers.

    Only the first failure of a start is kept, and one that follows from another rank's is not published.
    """
    if report["consequence"]:
        return

    def publish() -> None:
        with suppress(RuntimeError):
            store.compare_set(_FAILED, "", json.dumps(dict(report)))

    # The link may be the very thing that is broken: a call that nobody answers must not keep this process.
    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    thread.join(_PUBLISH_SECONDS)


def published_failure(store: "dist.Store") -> dict[str, Any] | None:
    """Return the first published failure, or None."""
    if not store.check([_FAILED]):
        return None
    return json.loads(store.get(_FAILED))


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message: torch appends a C++ stack to some."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
