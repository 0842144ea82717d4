"""Process group that exists already → a store of the run's own."""

import json
import os
import secrets
from typing import TYPE_CHECKING

import attrs

from forge_dist._errors import MeetingError
from forge_dist.environment._topology import Topology
from forge_dist.ranks import _collectives as collectives
from forge_dist.ranks._hosting import host_store
from forge_dist.ranks._network import choose_interface, machine_here
from forge_dist.ranks._store import first_line

if TYPE_CHECKING:
    import torch.distributed as dist

_LOOPBACK = "127.0.0.1"


def meet_in_group(topology: Topology, host: str) -> tuple[Topology, "dist.Store | None"]:
    """Open a store on rank 0 and tell its address through the process group; *collective*.

    The group's own store has no public name, and its keys are not this run's.

    Args:
        topology: of a worker that has a process group.
        host: name of this machine.

    Returns:
        The topology with the store's address and this rank's place on its node, and the store, on rank 0 only, which lives as
        long as it is held.

    Raises:
        MeetingError: the ranks do not reach each other.
    """
    import torch
    import torch.distributed as dist

    address, cpu = os.environ.get("MASTER_ADDR", "").strip(), torch.device("cpu")
    if address:
        choose_interface(address, int(os.environ.get("MASTER_PORT", "").strip() or 1))
    store: dist.TCPStore | None = None
    try:
        # Of a backend that carries bytes of the host's memory, whatever the group that is there works on.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)
        machine = machine_here()
        found = [json.loads(part) for part in collectives.gather_bytes(json.dumps([host, machine]).encode(), group, cpu)]
        machines = [each for _, each in found]
        nodes = list(dict.fromkeys(machines))
        alone = len(nodes) == 1
        meeting = _LOOPBACK if alone else address or found[0][0]
        port, secret = 0, ""
        if topology.rank == 0:
            store = host_store(meeting, 0, alone=alone, ranks=len(found))
            port, secret = store.port, secrets.token_hex(16)
        port, secret = json.loads(collectives.broadcast_bytes(json.dumps([port, secret]).encode(), group, cpu))
        dist.destroy_process_group(group)
    except (dist.DistError, OSError, RuntimeError) as error:
        raise MeetingError(
            f"rank {topology.rank} on {host} has a process group, and could not meet its other ranks over gloo "
            f"({first_line(error)}): check that the nodes reach each other on every port"
        ) from error
    return attrs.evolve(
        topology,
        master=(meeting, port),
        rdzv_id=secret,
        local_rank=machines[: topology.rank].count(machine),
        local_world_size=machines.count(machine),
        node_rank=nodes.index(machine),
        min_nodes=len(nodes),
        max_nodes=len(nodes),
        nproc_per_node=machines.count(machine),
    ), store
