"""Heartbeat between ranks: ends this process soon after a host or its link is gone.

A cut link sends nothing: a collective, and a call to the store, would wait for hours. So one thread asks the store, and another
watches how long ago the store answered. Local rank 0 of each node counts up under a key of its own; rank 0 reads all of these
and writes one pulse, which the others read, so that the load of the store grows with the nodes and not with their square. Of
many nodes and ranks each asks less often (`beat_seconds`), and learns from the pulse whether a rank has failed.
"""

import json
import os
import threading
from contextlib import suppress
from typing import Any

from forge_dist._errors import LaunchError, WorkerError
from forge_dist.environment._topology import Topology
from forge_dist.ranks._failure_report import failure_report, write_report
from forge_dist.ranks._messages import Messages
from forge_dist.ranks._network import unreachable
from forge_dist.ranks._store import connect_store, published_failure
from forge_dist.watching._beats import current_beats
from forge_dist.watching._stacks import dump_now
from forge_dist.watching._under_guard import dismiss_guard
from forge_dist.watching._watch import TICK_SECONDS, AwakeClock

_BEAT_REQUESTS, _LOOK_REQUESTS = 3, 2
"""Requests of a beat of a node's first rank, and of a look of every other one, that do not ask for failures."""
NODES_BUDGET, RANKS_BUDGET = 55.0, 80.0
"""Requests a second that the first ranks of all nodes, and all other ranks, send to the store at most, in a run that is
not small: what is left of 200 is for what they ask when rank 0 is done with something."""
_SMALL = 64
"""Ranks of a run, at most, each of which asks for failures itself."""
_BEATS_IN_LIMIT = 4
_STOP_SECONDS = 2.0
"""Most seconds for which a thread is waited for: a host that is gone may never answer it."""


def beat_seconds(nodes: int, ranks: int, *, leads: bool, least: float) -> float:
    """Return the seconds between two beats of a rank.

    Args:
        nodes: of the run.
        ranks: of the run.
        leads: whether this rank is the first of its node.
        least: seconds between two beats of a small run.

    >>> [round(beat_seconds(128, 1024, leads=leads, least=2.0), 1) for leads in (True, False)]
    [7.0, 22.4]
    """
    if leads:
        return max(least, (nodes * _BEAT_REQUESTS + 1) / NODES_BUDGET)
    return max(least, (ranks - nodes) * _LOOK_REQUESTS / RANKS_BUDGET)


def _beat_of(node: int) -> str:
    return f"beat/{node}"


class Heartbeat:
    """Heartbeat of one rank: a thread that asks the store, and one that watches for its answers."""

    def __init__(self, topology: Topology, host: str) -> None:
        self._topology = topology
        self._host = host
        # Seconds between two beats, and of silence after which a host counts as gone. Private variables shorten them for tests.
        least = float(os.environ.get("FORGE_HEARTBEAT_INTERVAL", "2"))
        leads, ranks = topology.local_rank == 0, topology.world_size or 1
        self._interval = beat_seconds(topology.max_nodes, ranks, leads=leads, least=least)
        # A rank of a small run asks for a failure at each beat; of a larger one it is told by rank 0's pulse.
        self._asks = ranks <= _SMALL
        self._limit = max(float(os.environ.get("FORGE_HEARTBEAT_LIMIT", "30")), _BEATS_IN_LIMIT * self._interval)
        # A rank that learns of another's failure waits this long for its own collective to fail, whose exception says where it
        # was.
        self._grace = float(os.environ.get("FORGE_HEARTBEAT_GRACE", "5"))
        self._nodes = topology.max_nodes
        self._clock = AwakeClock()
        self._answered = 0.0
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []
        self.store: Messages = connect_store(topology, second=True)
        """Its own connection to the store."""
        # node -> its last count, and when (on our clock) it changed; the pulse counts as node -1.
        self._counts: dict[int, tuple[int, float]] = {}
        self._names: dict[int, str] = {}
        # node -> beats of the rank that speaks for it, by which the others know that the run moves.
        self._moved: dict[int, int] = {}

    def start(self) -> None:
        """Start both threads."""
        for target in (self._beat, self._watch_store):
            self._threads.append(threading.Thread(target=target, name=f"forge-heartbeat{target.__name__}", daemon=True))
            self._threads[-1].start()

    def stop(self) -> None:
        """Stop both threads, and wait a little while for a call to the store to return.

        An interpreter that ends while a thread is in such a call ends with SIGABRT, and the connection is its caller's next.
        """
        self._stopped.set()
        for thread in self._threads:
            thread.join(_STOP_SECONDS)

    def _beat(self) -> None:
        count = 0
        broken: float | None = None
        while not self._stopped.is_set():
            count += 1
            try:
                self._exchange(count)
                self._answered, broken = self._clock.seconds, None
            except RuntimeError:
                # The connection was closed: the store's host ended, or something between cut it. Try once more before giving
                # up.
                broken = self._clock.seconds if broken is None else broken
                if self._clock.seconds - broken > self._grace:
                    self._exit_process(
                        f"{self._store_address()} does not answer any more: the launcher or rank that held the store there "
                        "ended"
                    )
                self._reconnect()
            self._stopped.wait(self._interval)

    def _exchange(self, count: int) -> None:
        t = self._topology
        if t.local_rank == 0:
            own = current_beats()
            moved = 0 if own is None else own.count
            self.store.set(_beat_of(t.node_rank or 0), json.dumps([count, self._host, t.rank, moved]))
        if t.rank == 0:
            lost = self._read_nodes()
            moved = sum(self._moved.values())
            failure = published_failure(self.store)
            self.store.set("pulse", json.dumps([count, self._host, lost, moved, failure is not None]))
            self._note_elsewhere(moved)
        else:
            lost, failed = self._read_pulse()
            failure = published_failure(self.store) if failed or self._asks else None
        if failure is not None and failure["rank"] != t.rank:
            self._stopped.wait(self._grace)
            self._exit_process(
                f"rank {failure['rank']} on {failure['host']} ended: {failure['class']}: {failure['text']}", failure
            )
        if lost:
            self._exit_process(lost)

    def _reconnect(self) -> None:
        assert self._topology.master is not None
        if not unreachable(*self._topology.master, TICK_SECONDS):
            with suppress(LaunchError):
                self.store = connect_store(self._topology, second=True)

    def _read_nodes(self) -> str:
        """Read every node's count, on rank 0; return "" or a sentence about one that is silent."""
        nodes = [node for node in range(self._nodes) if node in self._counts]
        if len(nodes) < self._nodes:
            new = [node for node in range(self._nodes) if node not in self._counts]
            nodes += new if self.store.has(*map(_beat_of, new)) else [node for node in new if self.store.has(_beat_of(node))]
        if not nodes:
            return ""
        for node, text in zip(nodes, self.store.read([*map(_beat_of, nodes)]), strict=True):
            if text is not None:
                count, host, rank, self._moved[node] = json.loads(text)
                self._names[node] = f"host {host} (rank {rank})"
            elif node in self._counts:
                count, _ = self._counts[node]  # no message of this run: the node is as silent as one that sends none
            else:
                continue
            silent = self._silent_seconds(node, count)
            if silent > self._limit:
                return self._silence_message(node, silent)
        return ""

    def _read_pulse(self) -> tuple[str, bool]:
        """Read rank 0's pulse; return what is silent, and whether to ask for a failure.

        On the other ranks. The first is "" or a sentence about a node: one that rank 0 names, or rank 0 itself. A pulse that
        stands still says nothing of failures.
        """
        if -1 not in self._counts and not self.store.has("pulse"):
            # It beats as soon as it comes; one that died before is waited for no longer than any rank.
            late = self._clock.seconds > self._topology.connect_seconds + self._limit
            return self._silence_message(-1, self._clock.seconds) if late else "", True
        (text,) = self.store.read(["pulse"])
        if text is not None:
            count, host, lost, moved, failed = json.loads(text)
            self._note_elsewhere(moved)
            self._names[-1] = f"host {host} (rank 0)"
        elif -1 in self._counts:
            (count, _), lost, failed = self._counts[-1], "", False
        else:
            return "", True
        silent = self._silent_seconds(-1, count)
        return lost or (self._silence_message(-1, silent) if silent > self._limit else ""), failed or silent > 0

    def _note_elsewhere(self, moved: int) -> None:
        """Tell who watches this rank that others move: it may wait for them."""
        own = current_beats()
        if own is not None:
            own.elsewhere(moved)

    def _silent_seconds(self, node: int, count: int) -> float:
        """Note a node's count; return the seconds since it last changed."""
        before = self._counts.get(node)
        if before is None or before[0] != count:
            self._counts[node] = (count, self._clock.seconds)
            return 0.0
        return self._clock.seconds - before[1]

    def _silence_message(self, node: int, seconds: float) -> str:
        who = self._names.get(node, "rank 0")
        return f"{who} was not heard of for {seconds:.0f} s: it died, or the network between the hosts is cut"

    def _watch_store(self) -> None:
        """Watch the time since the store last answered: the other thread may hang in a call."""
        while not self._stopped.wait(TICK_SECONDS):
            silent = self._clock.tick() - self._answered
            if silent > self._limit:
                who = self._names.get(-1, "the host of rank 0")
                self._exit_process(
                    f"{who} was not heard of for {silent:.0f} s at {self._store_address()}: it died, or the network between "
                    "the hosts is cut"
                )

    def _store_address(self) -> str:
        assert self._topology.master is not None
        host, port = self._topology.master
        return f"{host}:{port}"

    def _exit_process(self, reason: str, failure: dict[str, Any] | None = None) -> None:
        """End the process with a report: the training thread may hang in a collective for good."""
        if self._stopped.is_set():
            return
        report = failure_report(WorkerError(reason), rank=self._topology.rank, host=self._host)
        write_report({**report, "cause": failure})
        # Where it hangs is worth as much as what the others did.
        dump_now()
        shown = "".join(sign if sign.isprintable() or sign == "\n" else repr(sign)[1:-1] for sign in reason)
        os.write(2, f"forge: {shown}; rank {self._topology.rank} leaves\n".encode(errors="replace"))
        dismiss_guard()
        os._exit(1)
