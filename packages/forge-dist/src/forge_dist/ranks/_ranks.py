"""A worker's topology → the ranks of the run, joined: first a store, then a process group."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from forge_dist._errors import LaunchError
from forge_dist.environment._topology import Topology
from forge_dist.ranks import _collectives as exchange
from forge_dist.ranks._agreement import disagreement
from forge_dist.ranks._failure_report_from_report import PREEMPTED, describe, exit_status_of
from forge_dist.ranks._first import first
from forge_dist.ranks._heartbeat import Heartbeat
from forge_dist.ranks._network_from_interface import choose_interface
from forge_dist.ranks._store import connect_store, first_line, publish_failure

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# Ranks that are gone are noticed by the heartbeat; this bounds waiting for one that lives and does something long, as an export.
COLLECTIVE_TIMEOUT = timedelta(hours=2)
_LEAVE_SECONDS = 0.05


class Ranks:
    """The ranks of a run, seen from one of them. Calls marked *collective* are made by all ranks, in the same order."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._store: dist.Store | None = None
        self._heartbeat: Heartbeat | None = None
        self._group: dist.ProcessGroup | None = None
        self._checkpoint_group: dist.ProcessGroup | None = None
        self._device: torch.device | None = None
        self._asked = 0
        self.rank: int = topology.rank
        """This rank, from 0."""
        self.world_size: int = 1 if topology.role == "single" else topology.world_size or 1
        """How many ranks there are."""
        self.local_rank: int = topology.local_rank
        """This rank among those of its node."""
        self.local_world_size: int = topology.local_world_size
        """How many ranks this node has."""
        self.node_rank: int = topology.node_rank or 0
        """This node, from 0."""
        self.host: str = socket.gethostname()
        """Name of this machine."""

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world_size={self.world_size}, host={self.host!r})"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """The process group of all ranks; None before `connect` and in a world of one."""
        return self._group

    def first(self, function: Callable[[], Any]) -> Any:
        """*Collective.* Rank 0 calls `function`, however long that takes; every rank gets what it returned (as JSON). Needs no `connect`.

        Raises:
            WorkerError: on the other ranks, soon after the function raised on rank 0, whose own exception is raised there.
        """
        if self._store is None:
            return exchange.from_json(exchange.to_json(function()))
        self._asked += 1
        return first(self._store, f"first/{self._asked}", function, rank=self.rank, host=self.host)

    def connect(self, backend: str, device: "torch.device") -> None:
        """*Collective.* Make the process group.

        Args:
            backend: torch's name of a collective backend, such as "gloo".
            device: this rank's device, on which that backend works.

        Raises:
            LaunchError: the ranks do not meet within `connect_seconds`, or fewer or more came than was promised.
        """
        if self._device is not None:
            raise LaunchError("these ranks are connected already")
        self._device = device
        if self._store is None:
            return
        import torch.distributed as dist

        self._meet(backend)
        if self._topology.max_nodes > 1 and self._topology.master is not None:
            choose_interface(*self._topology.master)
        bound = device if device.type != "cpu" and device.index is not None else None
        try:
            dist.init_process_group(
                backend,
                store=dist.PrefixStore("group", self._store),
                rank=self.rank,
                world_size=self.world_size,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=bound,
            )
            self._group = dist.group.WORLD
            present = int(self.sum([1.0])[0])
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise LaunchError(
                f"rank {self.rank} on {self.host} could not connect to the other ranks over {backend}: check that the nodes reach each"
                f" other on every port, not only on the one they meet at ({first_line(error)})"
            ) from error
        if present != self.world_size or dist.get_world_size() != self.world_size:
            raise LaunchError(f"{self.world_size} ranks were promised and {present} are connected")

    def _meet(self, backend: str) -> None:
        """Wait until every rank came this far; a process group that waits says neither who is missing nor for how long."""
        import torch.distributed as dist

        assert self._store is not None
        seconds = self._topology.connect_seconds
        self._store.set(f"here/{self.rank}", f"{self.host} {backend}")
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        try:
            self._store.wait(keys, timedelta(seconds=max(seconds, 1.0)))
        except dist.DistStoreError as error:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.check([key])]
            raise LaunchError(
                f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {self.world_size} did not come within {seconds:g} s: check the logs"
                " of the nodes that should have started them"
            ) from error

    def agree(self, what: Mapping[str, str]) -> None:
        """*Collective.* Compare each name's digest over all ranks.

        Raises:
            LaunchError: on every rank, with the same message, naming what differs on which ranks.
        """
        message = disagreement(self.gather(dict(what)))
        if message:
            raise LaunchError(message)

    def sum(self, values: Sequence[float]) -> list[float]:
        """*Collective.* Sums over ranks in float64, correctly rounded, the same bits on every rank. As many values on each."""
        if self._group is None:
            self._check_connected()
            return [float(value) for value in values]
        assert self._device is not None
        return exchange.sum_numbers(values, self.world_size, self._group, self._device)

    def any(self, flag: bool) -> bool:
        """*Collective.* Whether the flag is set on at least one rank."""
        return self.sum([float(bool(flag))])[0] > 0

    def barrier(self) -> None:
        """*Collective.* Return once all ranks have come here."""
        self.sum([0.0])

    def gather(self, value: object) -> list[Any]:
        """*Collective.* Every rank's value (as JSON), by rank, on every rank."""
        data = exchange.to_json(value)
        if self._group is None:
            self._check_connected()
            return [exchange.from_json(data)]
        assert self._device is not None
        return [exchange.from_json(part) for part in exchange.gather_bytes(data, self._group, self._device)]

    def broadcast(self, value: object) -> Any:
        """*Collective.* Rank 0's value (as JSON), on every rank; what the others give is not looked at."""
        if self._group is None:
            self._check_connected()
            return exchange.from_json(exchange.to_json(value))
        assert self._device is not None
        data = exchange.to_json(value) if self.is_first else b""
        return exchange.from_json(exchange.broadcast_bytes(data, self._group, self._device))

    def checkpoint_group(self) -> "dist.ProcessGroup | None":
        """*Collective at the first call.* A gloo group of its own, for saving in the background beside the training's collectives."""
        if self._group is not None and self._checkpoint_group is None:
            import torch.distributed as dist

            made = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            # Every rank is a member; torch gives a number to those that are not.
            assert not isinstance(made, int)
            self._checkpoint_group = made
        return self._checkpoint_group

    def _check_connected(self) -> None:
        if self._store is not None:
            raise LaunchError("these ranks are not connected yet: call connect() first")

    def _join(self) -> None:
        self._store = connect_store(self._topology)
        self._heartbeat = Heartbeat(self._topology, self.host)
        self._heartbeat.start()

    def _leave_well(self) -> None:
        """Beat until every rank is done: rank 0 may write for minutes after the others have nothing left to do."""
        import torch.distributed as dist

        assert self._store is not None
        assert self._heartbeat is not None
        # The host of the store may be gone as soon as all have left.
        with contextlib.suppress(dist.DistError, RuntimeError):
            left = self._store.add("left", 1)
            while left < self.world_size:
                time.sleep(_LEAVE_SECONDS)
                left = self._store.add("left", 0)
        self._heartbeat.stop()
        with contextlib.suppress(RuntimeError):
            if self._group is not None:
                dist.destroy_process_group()
        self._group = self._checkpoint_group = None

    def _leave_badly(self, error: BaseException) -> None:
        """Say why before the others find this rank gone, and leave the group alone: nobody may answer there any more."""
        assert self._heartbeat is not None
        self._heartbeat.stop()
        if self._store is not None:
            publish_failure(self._store, describe(error, rank=self.rank, host=self.host))


@contextmanager
def join(topology: Topology) -> Iterator[Ranks]:
    """The ranks of this run: a world of one without torch.distributed, or those that a launcher started, met at its store.

    Raises:
        LaunchError: for a launcher's topology, which is no rank, or where nobody answers at the store's address.
    """
    if topology.role == "launcher":
        raise LaunchError("a launcher is no rank: it starts them with launch()")
    ranks = Ranks(topology)
    if ranks.world_size == 1:
        yield ranks
        return
    if topology.master is None:
        raise LaunchError(f"a world of {ranks.world_size} ranks needs MASTER_ADDR and MASTER_PORT")
    ranks._join()
    try:
        yield ranks
    except SystemExit as error:
        if exit_status_of(error) not in (0, PREEMPTED):
            ranks._leave_badly(error)
            raise
        ranks._leave_well()
        raise
    except BaseException as error:
        ranks._leave_badly(error)
        raise
    else:
        ranks._leave_well()
