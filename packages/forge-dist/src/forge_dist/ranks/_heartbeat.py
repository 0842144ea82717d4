"""Ranks that tell each other that they live → the end of this process, with a reason, soon after a host or its link is gone.

A cut link sends nothing: a collective, and a call to the store, would wait for hours. So one thread asks the store, and another looks at
how long ago it was answered. The speaker of each node (its local rank 0) counts up under a key of its own; rank 0 reads all of these and
writes one pulse, which the others read, so that the work at the store grows with the nodes and not with their square.
"""

import json
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from forge_dist._errors import LaunchError, WorkerError
from forge_dist.environment._topology import Topology
from forge_dist.ranks._failure_report_from_report import describe, write_report
from forge_dist.ranks._network import unreachable
from forge_dist.ranks._store import connect_store, published_failure

if TYPE_CHECKING:
    import torch.distributed as dist

# Seconds between two beats, and of silence after which a host counts as gone. Private variables shorten them for tests.
INTERVAL_SECONDS = float(os.environ.get("FORGE_HEARTBEAT_INTERVAL", "2"))
LIMIT_SECONDS = float(os.environ.get("FORGE_HEARTBEAT_LIMIT", "30"))
# A rank that hears of another's failure waits this long for its own collective to fail, whose exception says where it was.
GRACE_SECONDS = float(os.environ.get("FORGE_HEARTBEAT_GRACE", "5"))
_TICK_SECONDS = 0.5


class Attention:
    """Seconds during which this process was awake: a clock that stands still while it is stopped, swapped out or held by one long call."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self.seconds = 0.0

    def tick(self) -> float:
        """Count the time since the last tick, at most two ticks of it."""
        now = time.monotonic()
        self.seconds += min(now - self._last, 2 * _TICK_SECONDS)
        self._last = now
        return self.seconds


class Heartbeat:
    """The two threads of one rank."""

    def __init__(self, topology: Topology, host: str) -> None:
        self._topology = topology
        self._host = host
        self._nodes = topology.max_nodes
        self._clock = Attention()
        self._answered = 0.0
        self._stopped = threading.Event()
        self._store: dist.Store = connect_store(topology, second=True)
        # node -> its last count, and when (on our clock) it changed; the pulse counts as node -1.
        self._heard: dict[int, tuple[int, float]] = {}
        self._names: dict[int, str] = {}

    def start(self) -> None:
        """Begin to beat and to listen."""
        for target in (self._beat, self._listen):
            threading.Thread(target=target, name=f"forge-heartbeat{target.__name__}", daemon=True).start()

    def stop(self) -> None:
        """Beat no more, and expect nothing more of the others."""
        self._stopped.set()

    def _beat(self) -> None:
        count = 0
        broken: float | None = None
        while not self._stopped.is_set():
            count += 1
            try:
                self._round(count)
                self._answered, broken = self._clock.seconds, None
            except RuntimeError:
                # The connection was closed: the store's host ended, or something between cut it. Try once more before giving up.
                broken = self._clock.seconds if broken is None else broken
                if self._clock.seconds - broken > GRACE_SECONDS:
                    self._leave(
                        f"{self._place()} does not answer any more: the launcher or rank that held the store there ended"
                    )
                self._connect_again()
            self._stopped.wait(INTERVAL_SECONDS)

    def _round(self, count: int) -> None:
        t = self._topology
        if t.local_rank == 0:
            self._store.set(f"beat/{t.node_rank}", json.dumps([count, self._host, t.rank]))
        if t.rank == 0:
            lost = self._collect()
            self._store.set("pulse", json.dumps([count, self._host, lost]))
        else:
            lost = self._follow()
        failure = published_failure(self._store)
        if failure is not None and failure["rank"] != t.rank:
            self._stopped.wait(GRACE_SECONDS)
            self._leave(f"rank {failure['rank']} on {failure['host']} ended: {failure['class']}: {failure['text']}", failure)
        if lost:
            self._leave(lost)

    def _connect_again(self) -> None:
        assert self._topology.master is not None
        if not unreachable(*self._topology.master, _TICK_SECONDS):
            with suppress(LaunchError):
                self._store = connect_store(self._topology, second=True)

    def _collect(self) -> str:
        """On rank 0: what every node says; "" or a sentence on the one that is silent."""
        for node in range(self._nodes):
            if node in self._heard or self._store.check([f"beat/{node}"]):
                count, host, rank = json.loads(self._store.get(f"beat/{node}"))
                self._names[node] = f"host {host} (rank {rank})"
                silent = self._hear(node, count)
                if silent > LIMIT_SECONDS:
                    return self._lost(node, silent)
        return ""

    def _follow(self) -> str:
        """On the others: what rank 0 says; "" or a sentence on the node that it, or rank 0 itself, that is silent."""
        if -1 not in self._heard and not self._store.check(["pulse"]):
            return ""
        count, host, lost = json.loads(self._store.get("pulse"))
        self._names[-1] = f"host {host} (rank 0)"
        silent = self._hear(-1, count)
        return lost or (self._lost(-1, silent) if silent > LIMIT_SECONDS else "")

    def _hear(self, node: int, count: int) -> float:
        """Note a count; seconds since it last changed."""
        before = self._heard.get(node)
        if before is None or before[0] != count:
            self._heard[node] = (count, self._clock.seconds)
            return 0.0
        return self._clock.seconds - before[1]

    def _lost(self, node: int, seconds: float) -> str:
        return f"{self._names[node]} was not heard of for {seconds:.0f} s: it died, or the network between the hosts is cut"

    def _listen(self) -> None:
        """Watch the time since the store last answered: the other thread may hang in a call that never returns."""
        while not self._stopped.wait(_TICK_SECONDS):
            silent = self._clock.tick() - self._answered
            if silent > LIMIT_SECONDS:
                who = self._names.get(-1, "the host of rank 0")
                self._leave(
                    f"{who} was not heard of for {silent:.0f} s at {self._place()}: it died, or the network between the hosts is cut"
                )

    def _place(self) -> str:
        assert self._topology.master is not None
        host, port = self._topology.master
        return f"{host}:{port}"

    def _leave(self, reason: str, failure: dict[str, Any] | None = None) -> None:
        """End the process: the thread that trains may hang in a collective for good."""
        if self._stopped.is_set():
            return
        report = describe(WorkerError(reason), rank=self._topology.rank, host=self._host)
        write_report({**report, "cause": failure})
        os.write(2, f"forge: {reason}; rank {self._topology.rank} leaves\n".encode())
        os._exit(1)
