"""Key-value store that all ranks of one start share, before any process group exists."""

import json
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from forge_dist._errors import LaunchError, MeetingError
from forge_dist.environment._topology import Topology
from forge_dist.ranks._hosting import host_store
from forge_dist.ranks._messages import Messages, run_secret
from forge_dist.ranks._network import unreachable

# Set by this package's launcher: differs between two starts of the same ranks, which share one store.
ROUND = "FORGE_ROUND"


def connect_store(topology: Topology, *, second: bool = False) -> Messages:
    """Connect to the store of this start's ranks.

    Rank 0 hosts it unless the launcher does (torchrun's TORCHELASTIC_USE_AGENT_STORE).

    Args:
        topology: a worker's.
        second: open another connection to a store that exists already. A connection is held by one call at a time, and a call
            that waits must not block the heartbeat.

    Raises:
        MeetingError: nothing answers at that address.
        LaunchError: rank 0 cannot listen there.
    """
    import torch.distributed as dist

    assert topology.master is not None
    host, port = topology.master
    hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    seconds = topology.connect_seconds
    timeout = timedelta(seconds=max(seconds, 1.0))
    store: dist.Store | None = None
    if topology.rank == 0 and not hosted and not second:
        alone, ranks = topology.max_nodes == 1, topology.world_size or 1
        try:
            store = host_store(host, port, alone=alone, ranks=ranks, timeout=timeout)
        except (dist.DistError, OSError, RuntimeError, ValueError) as error:
            raise LaunchError(
                f"rank 0 cannot listen at {host}:{port}, where the ranks are to meet ({first_line(error)}): another run may "
                "use that port; set MASTER_PORT (under Slurm master_port) to a free one"
            ) from error
    elif not (why := unreachable(host, port, seconds)):
        try:
            store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        except (dist.DistError, RuntimeError, ValueError) as error:
            why = first_line(error)
    if store is None:
        raise MeetingError(
            f"rank {topology.rank} did not reach the ranks' meeting place {host}:{port} within {seconds:g} s ({why}): check "
            "that node 0 is up, that MASTER_ADDR and MASTER_PORT are its own, and that no firewall closes the port"
        )
    # The ranks that failed before are another round, whose keys must not be read; nor those of another run at the same port.
    start = os.environ.get(ROUND) or f"{topology.rdzv_id}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    return Messages(store, run_secret(topology.rdzv_id), f"forge/{start}")


# The key of the first failure of a start, and for how long a rank that fails tries to publish it.
_FAILED = "failed"
_PUBLISH_SECONDS = 3.0


def publish_failure(store: Messages, report: Mapping[str, Any]) -> None:
    """Publish why this rank ends to all ranks and launchers.

    Only the first failure of a start is kept, and one that follows from another rank's is not published.
    """
    if report["consequence"]:
        return

    def publish() -> None:
        with suppress(RuntimeError):
            store.claim(_FAILED, json.dumps(dict(report)))

    # The link may be the very thing that is broken: a call that nobody answers must not keep this process.
    thread = threading.Thread(target=publish, daemon=True)
    thread.start()
    thread.join(_PUBLISH_SECONDS)


def published_failure(store: Messages) -> dict[str, Any] | None:
    """Return the first published failure, or None; what was not written by this run is none."""
    if not store.has(_FAILED):
        return None
    (text,) = store.read([_FAILED])
    return None if text is None else json.loads(text)


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message: torch appends a C++ stack to some."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
