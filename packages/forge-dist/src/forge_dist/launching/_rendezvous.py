"""Rendezvous of all nodes' launchers, with an error that names the nodes that did not come.

The nodes of a run of fixed size meet at the master's address, as in torch's static rendezvous, which names neither the missing
nodes nor two nodes of one rank. Elastic runs use torch's c10d rendezvous as it is.
"""

import json
import os
import secrets
import socket
import time
import uuid
from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistError, DistNetworkError, DistStoreError, TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from forge_dist._errors import LaunchError, MeetingError
from forge_dist.environment._topology import Topology, host_and_port
from forge_dist.ranks._heartbeat import NODES_BUDGET
from forge_dist.ranks._hosting import host_store
from forge_dist.ranks._messages import SECRET, Messages, run_secret
from forge_dist.ranks._network import address_towards, unreachable
from forge_dist.ranks._store import first_line

_LOOPBACK = "127.0.0.1"
# Signals are handled between two waits.
_WAIT_SECONDS = 1.0
_WAIT_REQUESTS = 4
"""Requests of one such wait, with the looks around it."""
_KEEP_OPEN_SECONDS = 5.0


def make_rendezvous(topology: Topology) -> "Rendezvous":
    """Make the rendezvous of a launcher's topology.

    Raises:
        MeetingError: nothing answers at rdzv_endpoint.
    """
    if topology.max_nodes == 1 and not os.environ.get(SECRET, "").strip():
        secret = secrets.token_hex(16)
    else:
        secret = run_secret(topology.rdzv_id)
    inner = _StaticRendezvous(topology, secret) if topology.rdzv_endpoint is None else _elastic(topology)
    return Rendezvous(topology, inner, secret)


class Rendezvous(RendezvousHandler):
    """Rendezvous that names each of its rounds, and counts how often the agent polled it."""

    def __init__(self, topology: Topology, inner: RendezvousHandler, secret: str) -> None:
        self._topology = topology
        self._inner = inner
        self.secret = secret
        """What signs the run's messages; a launcher's workers get it."""
        self.round = ""
        """Name of the newest round, the same on all nodes and unique."""
        self.nodes = 0
        """Number of nodes in the newest round."""
        self.node_rank = 0
        """Number of this node in the newest round, from 0."""
        self.polls = 0
        """How often the agent asked for waiting nodes, which it does whenever it found its workers healthy."""
        self.store_address: tuple[str, int] | None = None
        """Host and port of the store that the workers share."""

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes.

        Raises:
            MeetingError: they did not come; it names the address, the time and what to check.
        """
        try:
            info = self._inner.next_rendezvous()
            if self._topology.rdzv_endpoint is not None:
                info = _with_this_rounds_store(info)
            messages = Messages(info.store, self.secret, "forge")
            if info.rank == 0:
                messages.set("round", uuid.uuid4().hex)
            self.round = messages.get("round")
        except (RendezvousError, DistError) as error:
            raise MeetingError(
                f"the nodes did not meet at {self._topology.rdzv_endpoint or self._topology.master} within "
                f"{self._topology.connect_seconds:g} s ({first_line(error)}): check that "
                f"{_count_nodes(self._topology.min_nodes)} {'were' if self._topology.min_nodes > 1 else 'was'} started with "
                f"the same rdzv_id ({self._topology.rdzv_id!r}), and that the port is open between them"
            ) from error
        self.nodes, self.node_rank = info.world_size, info.rank
        address = info.bootstrap_store_info
        self.store_address = None if address is None else (address.master_addr, address.master_port)
        return info

    @property
    def use_agent_store(self) -> bool:
        """Whether workers use the launchers' store."""
        return self._inner.use_agent_store

    def get_backend(self) -> str:
        """Return the backend's name, for torch's events."""
        return self._inner.get_backend()

    def is_closed(self) -> bool:
        """Return whether no more nodes may join."""
        return self._inner.is_closed()

    def set_closed(self) -> None:
        """Refuse further nodes."""
        self._inner.set_closed()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait to join an elastic run."""
        self.polls += 1
        return self._inner.num_nodes_waiting()

    def get_run_id(self) -> str:
        """Return the name of the run."""
        return self._inner.get_run_id()

    def shutdown(self) -> bool:
        """Close the rendezvous."""
        return self._inner.shutdown()


class _StaticRendezvous(RendezvousHandler):
    """Rendezvous of a run of fixed size, each node with its rank, at the master's address."""

    def __init__(self, topology: Topology, secret: str) -> None:
        self._topology, self._secret = topology, secret
        self._rank = topology.node_rank or 0
        self._store: TCPStore | None = None
        self._rounds = 0
        self._host, self._port = topology.master or (_LOOPBACK, 0)

    def get_backend(self) -> str:
        return "static"

    @property
    def use_agent_store(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._topology.rdzv_id

    def shutdown(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        end = time.monotonic() + self._topology.connect_seconds
        if self._store is None:
            self._store = self._host_store() if self._rank == 0 else self._connect_store(end)
        self._rounds += 1
        messages = Messages(self._store, self._secret, f"{self._topology.rdzv_id}/{self._rounds}")
        if self._topology.max_nodes > 1:
            self._wait_for_nodes(messages, end)
        return RendezvousInfo(messages.store, self._rank, self._topology.max_nodes, RendezvousStoreInfo(self._host, self._port))

    def _host_store(self) -> TCPStore:
        t = self._topology
        try:
            store = host_store(
                self._host, self._port, alone=t.max_nodes == 1, ranks=t.world_size or t.max_nodes * t.nproc_per_node
            )
        except (DistError, OSError, RuntimeError) as error:
            raise LaunchError(
                f"node 0 cannot listen on port {self._port} ({first_line(error)}): another run may use it; set master_port, "
                "or the port of rdzv_endpoint, to a free one"
            ) from error
        self._port = store.port
        return store

    def _connect_store(self, end: float) -> TCPStore:
        seconds = self._topology.connect_seconds
        address = f"{self._host}:{self._port}"
        why = unreachable(self._host, self._port, end - time.monotonic())
        if not why:
            try:
                return TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=_time_left(end))
            except (DistError, RuntimeError) as error:
                why = f"what answers there is no launcher: {first_line(error)}"
        raise MeetingError(
            f"node {self._rank} did not reach node 0 at {address} within {seconds:g} s ({why}): check that node 0 was "
            f"started, that this address is its own (master_addr and master_port, or rdzv_endpoint), that node_rank is 0 there "
            f"and {self._rank} here, and that no firewall closes the port"
        )

    def _wait_for_nodes(self, store: Messages, end: float) -> None:
        t = self._topology
        here = socket.gethostname()
        own = {"host": here, "nnodes": t.max_nodes, "nproc_per_node": t.nproc_per_node, "process": uuid.uuid4().hex}
        taken = store.claim(f"node/{self._rank}", json.dumps(own))
        if taken is not None:
            raise LaunchError(
                f"node_rank {self._rank} is taken by {json.loads(taken)['host']}, and {here} has it too: each node needs its "
                "own, from 0"
            )
        try:
            self._wait_for_all(store, end)
            nodes = [None if text is None else json.loads(text) for text in store.read([*map(_node, range(t.max_nodes))])]
            store.count("read")
        except DistNetworkError as error:
            raise MeetingError(f"node 0 at {self._host}:{self._port} went away while the nodes met") from error
        for node, theirs in enumerate(nodes):
            if theirs is None:
                self._keep_store_open(store, t.max_nodes)
                raise LaunchError(
                    f"what node {node} wrote at {self._host}:{self._port} is not signed with this run's secret: set the same "
                    f"{SECRET} (or the same rdzv_id) on every node; with that, another program writes there"
                )
            for name, mine in (("nnodes", t.max_nodes), ("nproc_per_node", t.nproc_per_node)):
                if theirs[name] != mine:
                    self._keep_store_open(store, t.max_nodes)
                    raise LaunchError(
                        f"node {node} ({theirs['host']}) was started with {name}={theirs[name]} and node {self._rank} "
                        f"({here}) with {name}={mine}: they must be the same on all nodes"
                    )

    def _wait_for_all(self, store: Messages, end: float) -> None:
        """Wait until every node has come; all that did come raise the same LaunchError otherwise."""
        t = self._topology
        # Of many nodes each looks less often; and for one missing node after the other, not for all of them each time.
        wait = timedelta(seconds=max(_WAIT_SECONDS, t.max_nodes * _WAIT_REQUESTS / NODES_BUDGET))
        node = 0
        while node < t.max_nodes:
            if store.has(_node(node)):
                node += 1
                continue
            if time.monotonic() > end:
                missing = [str(late) for late in range(node, t.max_nodes) if not store.has(_node(late))]
                named = ", ".join(missing[:8]) + ("…" if len(missing) > 8 else "")
                message = (
                    f"node{'s' * (len(missing) > 1)} {named} of {t.max_nodes} did not come to {self._host}:{self._port} "
                    f"within {t.connect_seconds:g} s: check that they were started, with nnodes={t.max_nodes} and a node_rank "
                    "of their own, and that they reach this address"
                )
                store.set("missing", message)
                store.count("read")
                self._keep_store_open(store, t.max_nodes - len(missing))
                raise MeetingError(message)
            if store.has("missing"):
                message = store.get("missing")
                # Only then: the host closes the store once all have read.
                store.count("read")
                raise MeetingError(message)
            with suppress(DistStoreError):  # its time is over
                store.requests += 1
                store.store.wait([_node(node)], wait)

    def _keep_store_open(self, store: Messages, readers: int) -> None:
        """On the host of the store: wait until as many nodes have read the reason."""
        end = time.monotonic() + _KEEP_OPEN_SECONDS
        while self._rank == 0 and store.count("read", 0) < readers and time.monotonic() < end:
            time.sleep(0.05)


def _node(node: int) -> str:
    return f"node/{node}"


def _elastic(topology: Topology) -> RendezvousHandler:
    seconds, endpoint = topology.connect_seconds, topology.rdzv_endpoint or ""
    # torch knows a node's own addresses by the name of the machine alone: nobody would listen at that of another network, and
    # the other nodes' ranks would look for it at a name that means themselves. Of two launchers on one machine the second one
    # finds the port taken.
    attempts: list[dict[str, bool]] = [{"is_host": True}, {"is_host": False}] if _is_here(endpoint) else [{}]
    for attempt in attempts:
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=endpoint,
            run_id=topology.rdzv_id,
            min_nodes=topology.min_nodes,
            max_nodes=topology.max_nodes,
            join_timeout=max(1, int(seconds)),
            # How long the minimum number of nodes waits for more; torch's 30 s would outlast a shorter join_timeout.
            last_call_timeout=max(1, int(min(seconds / 2, 30))),
            read_timeout=max(1, int(min(seconds, 60))),
            local_addr=address_towards(*host_and_port(endpoint)),
            **attempt,
        )
        try:
            return get_rendezvous_handler(parameters)
        except (RendezvousError, DistError, ValueError) as error:
            if attempt.get("is_host"):
                continue
            raise MeetingError(
                f"nobody answers at rdzv_endpoint {endpoint} ({first_line(error)}): check the address, that the node of that "
                "name was started, and that no firewall closes the port"
            ) from error
    raise AssertionError("the last attempt returns or raises")


def _with_this_rounds_store(info: RendezvousInfo) -> RendezvousInfo:
    """Tell all nodes of a round where its workers' store is.

    torch does so in the first round of each node alone: one that comes later would wait for it, and one that is no longer first
    would keep its own.
    """
    address = info.bootstrap_store_info
    names = RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY
    if info.rank == 0 and address is not None:
        for name, value in zip(names, (address.master_addr, str(address.master_port)), strict=True):
            info.store.set(name, value)
        return info
    host, port = (info.store.get(name).decode() for name in names)
    return RendezvousInfo(info.store, info.rank, info.world_size, RendezvousStoreInfo(host, int(port)))


def _is_here(endpoint: str) -> bool:
    """Return whether HOST:PORT is an address of this machine, on whichever of its networks."""
    host, _ = host_and_port(endpoint)
    try:
        found = {(family, address[0]) for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    for family, address in found:
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            # A port of the system's choice: only the address is in question.
            probe.bind((address, 0))
            return True
    return False


def _time_left(end: float) -> timedelta:
    return timedelta(seconds=max(1.0, end - time.monotonic()))


def _count_nodes(number: int) -> str:
    return f"{number} node{'s' * (number > 1)}"
