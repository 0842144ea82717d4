"""The ranks of a run, joined: first over a store, then in a process group."""

import contextlib
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_dist._errors import LaunchError, MeetingError
from forge_dist.environment._existing import note_own_group
from forge_dist.environment._topology import Topology
from forge_dist.ranks import _collectives as collectives
from forge_dist.ranks._agreement import disagreement
from forge_dist.ranks._failure_report import PREEMPTED, beats_of_launcher, exit_status_of, failure_report, write_report
from forge_dist.ranks._first import run_on_first
from forge_dist.ranks._heartbeat import Heartbeat
from forge_dist.ranks._meeting import meet_in_group
from forge_dist.ranks._messages import Messages
from forge_dist.ranks._network import choose_interface
from forge_dist.ranks._relay import Relay, leave_run, relays
from forge_dist.ranks._store import connect_store, first_line, publish_failure
from forge_dist.watching._beats import current_beats, doing, open_beats
from forge_dist.watching._stacks import traces_of
from forge_dist.watching._under_guard import under_guard

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# The heartbeat notices ranks that are gone and the watch those that stand still; this limits waiting for one that moves, but
# does something long alone, such as an export. It is longer than any stall, whose message says more.
COLLECTIVE_HOURS = 2
_TIMES_STALL = 4


class Ranks:
    """The ranks of a run, as one of them sees them.

    Calls that are *collective* are made by all ranks, in the same order.
    """

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        self._store: Messages | None = None
        self._relay: Relay | None = None
        self._hosted: dist.Store | None = None
        self._heartbeat: Heartbeat | None = None
        self._group: dist.ProcessGroup | None = None
        self._checkpoint_group: dist.ProcessGroup | None = None
        self._device: torch.device | None = None
        self._wire: torch.device | None = None
        self._first_calls = 0
        self.rank: int = topology.rank
        """Number of this rank, from 0."""
        self.world_size: int = 1 if topology.role == "single" else topology.world_size or 1
        """R, the number of ranks."""
        self.local_rank: int = topology.local_rank
        """Number of this rank on its node, from 0."""
        self.local_world_size: int = topology.local_world_size
        """Number of ranks on this node."""
        self.node_rank: int = topology.node_rank or 0
        """Number of this node, from 0."""
        self.host: str = socket.gethostname()
        """Name of this machine."""
        self.explain: Callable[[BaseException], BaseException] = lambda error: error
        """Error that `first` raised on rank 0 → the one that the other ranks are told: it may say what to do."""
        self.at_exit: contextlib.ExitStack = contextlib.ExitStack()
        """Callbacks at the end of the `join` block, whatever ends it."""

    def __repr__(self) -> str:
        return f"Ranks(rank={self.rank}, world_size={self.world_size}, host={self.host!r})"

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def group(self) -> "dist.ProcessGroup | None":
        """Process group of all ranks; None before `connect` and on one rank."""
        return self._group

    def first(self, function: Callable[[], Any]) -> Any:
        """Call `function` on rank 0 and return its value (as JSON) on every rank; *collective*.

        It may take hours, and needs no `connect`.

        Raises:
            WorkerError: on the other ranks, soon after the function raised on rank 0, whose own exception is raised there. Its
                message is that of the exception as `explain` has it.
        """
        if self._store is None:
            return collectives.from_json(collectives.to_json(function()))
        self._first_calls += 1
        key = f"first/{self._first_calls}"
        store = self._store if self._relay is None else self._relay
        return run_on_first(store, key, function, rank=self.rank, host=self.host, explain=self.explain)

    def connect(
        self, backend: str, device: "torch.device", *, traces: Callable[[str], Mapping[str, str]] | None = None
    ) -> None:
        """Make the process group, or take the one that this process has; *collective*.

        Args:
            backend: torch's name of a collective backend, such as "gloo".
            device: this rank's device, on which that backend works.
            traces: prefix of files → the variables under which the backend records its calls, for the report of a stall.

        Raises:
            MeetingError: the ranks do not meet within `connect_seconds`.
            LaunchError: fewer or more came than was promised.
        """
        if self._device is not None:
            raise LaunchError("these ranks are connected already")
        self._device = device
        if self._store is None:
            return
        import torch
        import torch.distributed as dist

        device = torch.device(device)  # or its name
        own = current_beats()
        for name, value in ({} if own is None or traces is None else traces(str(traces_of(own.path)))).items():
            os.environ.setdefault(name, value)
        self._wait_for_all(backend)
        bound = device if device.type != "cpu" and device.index is not None else None
        try:
            if not self._topology.has_group:
                if self._topology.max_nodes > 1 and self._topology.master is not None:
                    choose_interface(*self._topology.master)
                dist.init_process_group(
                    backend,
                    store=dist.PrefixStore("group", self._store.store),
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=collective_timeout(self._topology),
                    device_id=bound,
                )
                note_own_group(made=True)
            self._group = dist.group.WORLD
            self._wire = device_of_host_numbers(dist.get_backend_config(self._group), device)
            present = int(self.sum([1.0])[0])
        except (dist.DistError, RuntimeError, ValueError) as error:
            raise MeetingError(
                f"rank {self.rank} on {self.host} could not connect to the other ranks over {backend}: check that the nodes "
                f"reach each other on every port, not only on the one they meet at ({first_line(error)})"
            ) from error
        if present != self.world_size or dist.get_world_size() != self.world_size:
            raise LaunchError(f"{self.world_size} ranks were promised and {present} are connected")

    def _wait_for_all(self, backend: str) -> None:
        """Wait until every rank came this far, or name the missing ones; a process group does not."""
        import torch.distributed as dist

        assert self._store is not None
        seconds = self._topology.connect_seconds
        self._store.set(f"here/{self.rank}", f"{self.host} {backend}")
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        try:
            self._store.store.wait(keys, timedelta(seconds=max(seconds, 1.0)))
        except dist.DistStoreError as error:
            missing = [str(rank) for rank, key in enumerate(keys) if not self._store.has(key)]
            raise MeetingError(
                f"rank{'s' * (len(missing) > 1)} {', '.join(missing)} of {self.world_size} did not come within {seconds:g} "
                "s: check the logs of the nodes that should have started them"
            ) from error

    def agree(self, what: Mapping[str, str]) -> None:
        """Compare each name's digest over all ranks; *collective*.

        Raises:
            LaunchError: on every rank, with the same message, naming what differs on which ranks.
        """
        message = disagreement(self.gather(dict(what)))
        if message:
            raise LaunchError(message)

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each value over ranks, in float64; *collective*.

        Correctly rounded, so the same bits on every rank; equally many values on each.
        """
        if self._group is None:
            self._check_connected()
            return [float(value) for value in values]
        assert self._wire is not None
        return collectives.sum_numbers(values, self.world_size, self._group, self._wire)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on at least one rank; *collective*."""
        return self.sum([float(bool(flag))])[0] > 0

    def largest(self, number: int) -> int:
        """Return the largest number of all ranks; *collective*."""
        if self._group is None:
            self._check_connected()
            return number
        assert self._wire is not None
        return collectives.largest_number(number, self._group, self._wire)

    def barrier(self) -> None:
        """Wait until all ranks have come here; *collective*."""
        self.sum([0.0])

    def gather(self, value: object) -> list[Any]:
        """Return every rank's value (as JSON), by rank, on every rank; *collective*."""
        data = collectives.to_json(value)
        if self._group is None:
            self._check_connected()
            return [collectives.from_json(data)]
        assert self._wire is not None
        return [collectives.from_json(part) for part in collectives.gather_bytes(data, self._group, self._wire)]

    def gather_rows(self, rows: "torch.Tensor") -> list["torch.Tensor"]:
        """Return every rank's rows [n, ...], by rank, on every rank, without a graph; *collective*.

        Each rank may have any number of rows, of one shape and dtype. They arrive to the bit.
        """
        if self._group is None:
            self._check_connected()
            return [rows.detach()]
        assert self._wire is not None
        return collectives.gather_rows(rows, self._group, self._wire)

    def broadcast(self, value: object) -> Any:
        """Return rank 0's value (as JSON) on every rank; the others' are ignored; *collective*."""
        if self._group is None:
            self._check_connected()
            return collectives.from_json(collectives.to_json(value))
        assert self._wire is not None
        data = collectives.to_json(value) if self.is_first else b""
        return collectives.from_json(collectives.broadcast_bytes(data, self._group, self._wire))

    def collect(self, value: object) -> list[Any] | None:
        """Return every rank's value (as JSON), by rank, on rank 0, and None elsewhere; *collective*."""
        data = collectives.to_json(value)
        if self._group is None:
            self._check_connected()
            return [collectives.from_json(data)]
        assert self._wire is not None
        parts = collectives.collect_bytes(data, self._group, self._wire)
        return None if parts is None else [collectives.from_json(part) for part in parts]

    def scatter(self, values: Sequence[object] | None) -> Any:
        """Return this rank's of rank 0's values (as JSON), one for each rank; *collective*."""
        parts = [collectives.to_json(value) for value in values or ()] if self.is_first else None
        if self._group is None:
            self._check_connected()
            assert parts is not None
            return collectives.from_json(parts[0])
        assert self._wire is not None
        return collectives.from_json(collectives.scatter_bytes(parts, self._group, self._wire))

    def checkpoint_group(self) -> "dist.ProcessGroup | None":
        """Return a gloo group for background saves, apart from the training's collectives.

        *Collective* at the first call; None on one rank.
        """
        if self._group is not None and self._checkpoint_group is None:
            import torch.distributed as dist

            made = dist.new_group(backend="gloo", timeout=collective_timeout(self._topology))
            # Every rank is a member; torch gives a number to those that are not.
            assert not isinstance(made, int)
            self._checkpoint_group = made
        return self._checkpoint_group

    def _check_connected(self) -> None:
        if self._store is not None:
            raise LaunchError("these ranks are not connected yet: call connect() first")

    def _open_store(self) -> None:
        if self._topology.has_group:
            self._topology, self._hosted = meet_in_group(self._topology, self.host)
            self.local_rank, self.local_world_size = self._topology.local_rank, self._topology.local_world_size
            self.node_rank = self._topology.node_rank or 0
        self._store = connect_store(self._topology, second=self._topology.has_group)
        self._heartbeat = Heartbeat(self._topology, self.host)
        self._heartbeat.start()
        if relays(self._topology):
            self._relay = Relay(self._store, self._topology)

    def _leave(self) -> None:
        """Keep the heartbeat until every rank is done: rank 0 may write long after the others."""
        import torch.distributed as dist

        assert self._store is not None
        assert self._heartbeat is not None
        # The host of the store may be gone as soon as all have left.
        with contextlib.suppress(dist.DistError, RuntimeError):
            leave_run(self._store, self._topology) if self._relay is None else self._relay.leave()
        self._heartbeat.stop()
        with contextlib.suppress(RuntimeError):
            if self._topology.has_group:
                # Rank 0 holds the store, and this process goes on: it is let go once nobody asks it any more.
                dist.barrier() if self._group is None else self.barrier()
                self._hosted = None
                if self._checkpoint_group is not None:
                    dist.destroy_process_group(self._checkpoint_group)
            elif self._group is not None:
                dist.destroy_process_group()
                note_own_group(made=False)
        if self._relay is not None:
            self._relay.close()
        self._group = self._checkpoint_group = self._relay = None

    def _leave_after_error(self, error: BaseException) -> None:
        """Publish the error before the others find this rank gone.

        The process group is left as it is: nobody may answer there any more.
        """
        if self._heartbeat is not None:
            self._heartbeat.stop()
        # Over the heartbeat's connection: the other one may be waiting for what never comes.
        store = self._store if self._heartbeat is None else self._heartbeat.store
        if store is not None:
            publish_failure(store, failure_report(error, rank=self.rank, host=self.host))
        if self._relay is not None:
            self._relay.close()  # this process may go on


def device_of_host_numbers(backends: str, device: "torch.device") -> "torch.device":
    """Return the device on which numbers of the host are exchanged.

    The host itself, where a backend serves it. On a GPU they would be copied there and back, after all that it still has to do.

    >>> import torch
    >>> (
    ...     device_of_host_numbers("cpu:gloo,meta:fast", torch.device("meta")),
    ...     device_of_host_numbers("meta:fast", torch.device("meta")),
    ... )
    (device(type='cpu'), device(type='meta'))
    """
    import torch

    kinds = {entry.partition(":")[0] for entry in backends.split(",")}
    return torch.device("cpu") if "cpu" in kinds else device


def collective_timeout(topology: Topology) -> timedelta:
    """Return how long a collective waits: two hours, or four times a longer stall_timeout."""
    return timedelta(seconds=max(3600.0 * COLLECTIVE_HOURS, _TIMES_STALL * (topology.stall_timeout or 0.0)))


@contextmanager
def join(topology: Topology, *, log_dir: Path | None = None) -> Iterator[Ranks]:
    """Join the ranks of this run; on one rank nothing is started.

    The ranks that a launcher started meet at its store.

    Args:
        topology: a worker's or a single process's.
        log_dir: folder for the stacks of a stall, made when there is one. A rank without a launcher of this package is watched
            only where this is given, by a process beside it: what stands still for `stall_timeout` raises StallError, or is
            ended. A launcher of this package watches its ranks itself.

    Raises:
        LaunchError: the topology is a launcher's, which is no rank, or nothing answers at the store's address.
    """
    if topology.role == "launcher":
        raise LaunchError("a launcher is no rank: it starts them with launch()")
    ranks = Ranks(topology)
    with _watched(topology, ranks, log_dir):
        if ranks.world_size == 1:
            with ranks.at_exit:
                yield ranks
            return
        with _joined(topology, ranks):
            yield ranks


@contextmanager
def _watched(topology: Topology, ranks: Ranks, log_dir: Path | None) -> Iterator[None]:
    """Let whoever watches this process see its beats, if it is watched."""
    given, timeout = beats_of_launcher(), topology.stall_timeout
    if timeout == 0 or (given is None and log_dir is None):
        yield
    elif given is not None:
        # Without room for the file, nothing is watched.
        with contextlib.suppress(OSError):
            open_beats(given, timeout)
        yield
        # Still watched: what hangs while it ends hangs all the same.
        doing("ending")
    else:
        assert log_dir is not None
        with under_guard(ranks.rank, ranks.world_size, log_dir, timeout, leave=partial(_leave_early, ranks)):
            yield


def _leave_early(ranks: Ranks, error: BaseException) -> None:
    """Write and publish why this process ends, while its main thread still hangs."""
    write_report(failure_report(error, rank=ranks.rank, host=ranks.host))
    ranks._leave_after_error(error)


@contextmanager
def _joined(topology: Topology, ranks: Ranks) -> Iterator[None]:
    if topology.master is None and not topology.has_group:
        raise LaunchError(f"a world of {ranks.world_size} ranks needs MASTER_ADDR and MASTER_PORT")
    ranks._open_store()
    try:
        with ranks.at_exit:
            yield
    except SystemExit as error:
        if exit_status_of(error) not in (0, PREEMPTED):
            ranks._leave_after_error(error)
            raise
        ranks._leave()
        raise
    except BaseException as error:
        ranks._leave_after_error(error)
        raise
    else:
        ranks._leave()
