"""Message of rank 0 → every rank of a node, of which one alone asks the run's store.

When rank 0 is done with something, all ranks wait for its word. If each fetched it from the one store of the run, a thousand
ranks would ask within a moment. So the first rank of each node fetches it, and hands it on over a store of its own, which no
other machine reaches: the load of the run's store grows with the nodes. A small run has no second store.
"""

import json
from contextlib import suppress

from forge_dist._errors import MeetingError
from forge_dist.environment._topology import Topology
from forge_dist.ranks._hosting import host_store
from forge_dist.ranks._messages import Messages
from forge_dist.ranks._network import unreachable

REQUESTS_OF_A_MESSAGE = 2
"""Requests of `Messages.receive`."""
BUDGET = 200
"""Requests that may reach the run's store within a second."""
_LOOPBACK = "127.0.0.1"
_CONNECT_SECONDS = 0.5
_LOOK_SECONDS, _MOST_SECONDS = 5.0, 60.0
"""Seconds until a node's first rank first looks for ranks that do without it, and between two looks at most."""
_ALL_LEFT = "all left"


def relays(topology: Topology) -> bool:
    """Return whether ranks of a node take rank 0's messages from the first of them.

    >>> from attrs import evolve
    >>> small = Topology(role="worker", world_size=64, local_world_size=8, max_nodes=8, node_known=True)
    >>> large = evolve(small, world_size=512, max_nodes=64)
    >>> relays(small), relays(large), relays(evolve(large, local_world_size=1, max_nodes=512))
    (False, True, False)
    >>> relays(evolve(large, node_known=False))  # as under mpirun: its ranks may lie on nodes in any order
    False
    """
    large = (topology.world_size or 1) * REQUESTS_OF_A_MESSAGE > BUDGET
    return large and topology.local_world_size > 1 and topology.node_known


def leave_run(store: Messages, topology: Topology, number: int = 1) -> None:
    """Count this rank among those that leave; wait until all ranks of the run do.

    Args:
        store: of the run.
        topology: of this rank.
        number: of ranks that it counts for, itself included.

    Raises:
        DistError: the host of the store is gone.
    """
    if store.count("left", number) == topology.world_size:
        store.set(_ALL_LEFT, "")
    else:
        store.wait(_ALL_LEFT)


class Relay:
    """Messages of rank 0 to all ranks, by way of the first rank of each node.

    Making one waits for that rank.

    Args:
        store: of the run; its connection is taken while a message is waited for.
        topology: of this rank.

    """

    def __init__(self, store: Messages, topology: Topology) -> None:
        self._run, self._topology = store, topology
        self._leads = topology.local_rank == 0
        self._place = f"relay/{topology.node_rank or 0}"
        self._alone = f"{self._place}/alone"
        self._node: Messages | None
        if self._leads:
            self._node, port = self._host()
            store.set(self._place, json.dumps(port))
        else:
            self._node = self._connect()

    def set(self, key: str, text: str) -> None:
        """Write a message, on rank 0."""
        self._run.set(key, text)
        self._hand_on(key, text)

    def receive(self, key: str) -> str:
        """Read a message; wait for it, for hours if need be.

        Where the first rank of the node is gone, or cannot be reached, the run's store is asked.

        Raises:
            MeetingError: what is there was not written by this run.
            DistError: the host of the run's store is gone.
        """
        if self._leads:
            text = self._run.receive(key)
            self._hand_on(key, text)
            return text
        if (node := self._node) is not None:
            try:
                return node.receive(key)
            except MeetingError:
                raise
            except RuntimeError:
                self._go_alone()
        return self._run.receive(key)

    def leave(self) -> None:
        """Wait until every rank of the run leaves, or the host of its store is gone.

        The first rank of a node counts for those that told it over the node's store.

        Raises:
            DistError: the host of the run's store is gone.
        """
        if self._leads:
            leave_run(self._run, self._topology, 1 + self._told())
            return self._hand_on(_ALL_LEFT, "")
        if (node := self._node) is not None:
            try:
                node.set(f"left/{node.count('left')}", "")
            except RuntimeError:
                self._go_alone()
            else:
                with suppress(RuntimeError):
                    return node.wait(_ALL_LEFT)
                # It died: its silence, or the end of the run's store, ends this wait.
                return self._run.wait(_ALL_LEFT)
        return leave_run(self._run, self._topology)

    def _told(self) -> int:
        """Wait for the ranks of this node that leave by way of this one; return their number."""
        from torch.distributed import DistStoreError

        if (node := self._node) is None:
            return 0
        others, alone, seconds = self._topology.local_world_size - 1, 0, _LOOK_SECONDS
        while True:
            if alone == others:
                return 0
            try:
                node.wait(f"left/{others - alone}", seconds)
                return others - alone
            except DistStoreError:
                # torch warns each time, and another rank of the node may take long.
                seconds = min(2 * seconds, _MOST_SECONDS)
                alone = self._run.count(self._alone, 0)

    def close(self) -> None:
        """Close the node's store, or the connection to it: who waits there asks the run's."""
        self._node = None

    def _host(self) -> tuple[Messages | None, int]:
        """Return a store for the ranks of this node, and its port; None and 0 without one."""
        try:
            store = host_store(_LOOPBACK, 0, alone=True, ranks=self._topology.local_world_size)
        except (OSError, RuntimeError, ValueError):
            return None, 0
        node = self._run.over(store)
        node.set(self._place, json.dumps(store.port))
        return node, store.port

    def _connect(self) -> Messages | None:
        """Connect to the store of this node's first rank; None where it has none."""
        import torch.distributed as dist

        with suppress(RuntimeError, ValueError, MeetingError):
            # A first rank that does not come is waited for half as long as all ranks are: this one comes in time to be counted.
            self._run.wait(self._place, max(self._topology.connect_seconds / 2, 1.0))
            port = json.loads(self._run.get(self._place))
            if port and not unreachable(_LOOPBACK, port, _CONNECT_SECONDS):
                node = self._run.over(dist.TCPStore(_LOOPBACK, port, is_master=False, wait_for_workers=False))
                # Containers of one node may have a network each, where another store may listen.
                if node.has(self._place) and json.loads(node.get(self._place)) == port:
                    return node
        with suppress(RuntimeError):  # the run's store is gone: whoever asks it next says so
            self._go_alone()
        return None

    def _go_alone(self) -> None:
        """Do without the first rank of this node from now on, and let it know."""
        self._node = None
        self._run.count(self._alone)

    def _hand_on(self, key: str, text: str) -> None:
        if (node := self._node) is not None:
            node.set(key, text)
