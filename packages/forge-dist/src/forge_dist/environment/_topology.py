"""The topology of a run: its processes and nodes, and what this process is among them.

Read without torch. Explicit settings outrank the environment, and the origin of each value is kept. An environment that is
partial or that contradicts itself is an error that names the variable: N copies that know nothing of each other would silently
train N models.
"""

import os
from collections.abc import Mapping
from typing import Literal

import attrs

from forge_dist._errors import LaunchError
from forge_dist._settings import PORTS, LaunchSettings
from forge_dist.environment._counts import parse_nodes, parse_processes
from forge_dist.environment._environment import LaunchValues
from forge_dist.environment._existing import existing_worker
from forge_dist.environment._mpi import mpi_worker
from forge_dist.environment._slurm import SlurmStep, slurm_step
from forge_dist.environment._worker import Worker, read_worker

# torchrun's own default, so that PET_MASTER_ADDR alone means here what it means there.
DEFAULT_PORT = 29500


@attrs.frozen(kw_only=True)
class Topology:
    """Processes of a run, where they meet, and which of them this one is."""

    role: Literal["single", "launcher", "worker"]
    """single: this process is the whole run; launcher: it starts this node's processes; worker: a launcher started it."""
    rank: int = 0
    """Rank of a worker among all, from 0; 0 otherwise."""
    world_size: int | None = None
    """Number of processes on all nodes; None for the launcher of an elastic run, whose size the rendezvous decides."""
    local_rank: int = 0
    """Rank of a worker on its node, from 0."""
    local_world_size: int = 1
    """Number of processes on this node."""
    node_rank: int | None = None
    """Number of this node, from 0; None where the rendezvous assigns it."""
    node_known: bool = False
    """Whether a worker's launcher said which node it is on, and how many ranks that has; else both are computed."""
    min_nodes: int = 1
    """Minimum number of nodes."""
    max_nodes: int = 1
    """Maximum number of nodes."""
    nproc_per_node: int = 1
    """Number of processes on each node."""
    master: tuple[str, int] | None = None
    """Host and port where the nodes of a run of fixed size meet; None on one node, which picks a free port."""
    rdzv_endpoint: str | None = None
    """HOST:PORT of torchrun's c10d rendezvous, for elastic runs."""
    rdzv_id: str = "forge"
    """Name of the run at that rendezvous."""
    max_restarts: int = 0
    """Number of times that the processes of this node are started again after one failed."""
    connect_seconds: float = 300.0
    """Time that nodes and ranks wait for each other, in seconds."""
    stall_timeout: float | None = None
    """Seconds that a step may stand still; None: by the run's own steps; 0: any time."""
    cores: int = 1
    """Number of processor cores that this process may use."""
    has_group: bool = False
    """Whether this process has a process group of these ranks already, which the run takes and leaves as it is."""
    origins: Mapping[str, str] = attrs.field(factory=dict)
    """Setting → its origin: "argument", an environment variable, or "default"."""

    @property
    def threads(self) -> int | None:
        """Threads of each process that a launcher starts: its share of the cores.

        None: as many as this process has.
        """
        if self.role != "launcher" or "OMP_NUM_THREADS" in os.environ:
            return None
        return max(1, self.cores // self.nproc_per_node)


def topology(
    settings: LaunchSettings, *, environ: Mapping[str, str] | None = None, devices: int = 0, cores: int | None = None
) -> Topology:
    """Determine what this process is, from settings, the environment and this node.

    With a process group of several ranks in this process, RANK set, or the variables of mpirun and a place to meet, it is a
    worker. Otherwise PET_* (torchrun, Kubeflow) or srun's variables make it a launcher, or a worker where srun started several
    tasks on a node. Without any of them the settings decide. One node with one process is `single`.

    Args:
        settings: the launch settings; each value that is not None outranks the environment.
        environ: the environment's variables; `os.environ` by default.
        devices: accelerators of this node, for `nproc_per_node="auto"` and `"gpu"`.
        cores: processor cores that this process may use, for `"cpu"`; by default those that the system grants it.

    Raises:
        LaunchError: settings and environment contradict each other or are partial; the message names them.

    >>> topology(LaunchSettings(), environ={}).role
    'single'
    >>> t = topology(LaunchSettings(nproc_per_node=2), environ={"PET_NPROC_PER_NODE": "8"})
    >>> t.role, t.world_size, t.origins["nproc_per_node"]
    ('launcher', 2, 'argument')
    """
    if cores is None:
        cores = _cores()
    if environ is None:
        environ = os.environ
        existing = existing_worker(environ, settings)
        if existing is not None:
            return attrs.evolve(_worker(settings, existing, cores), has_group=True)
    if environ.get("RANK", "").strip():
        return _worker(settings, read_worker(environ, settings), cores)
    by_mpi = mpi_worker(environ)
    if by_mpi is not None:
        return _worker(settings, read_worker(by_mpi, settings), cores)
    _refuse_partial_environment(environ, settings)
    _refuse_lone_pod(environ, settings)
    found = LaunchValues(settings, environ)
    # SLURM's variables count where neither settings nor PET_* give the number of nodes.
    asked = found.origin("nproc_per_node") != "default"
    step = slurm_step(environ, processes_asked=asked) if found.origin("nnodes") == "default" else None
    if step is not None and step.tasks > step.nodes:
        return _worker(settings, _slurm_worker(step, settings), cores)
    return _launcher(found, step, devices, cores)


def _launcher(found: LaunchValues, step: SlurmStep | None, devices: int, cores: int) -> Topology:
    origins: dict[str, str] = {}

    def take(name: str, default: object = None) -> object:
        value, origins[name] = found.value(name, default)
        return value

    if step is not None:
        found = found.with_defaults(
            {
                "nnodes": (step.nodes, "SLURM_STEP_NUM_NODES"),
                "node_rank": (step.node, "SLURM_NODEID"),
                "master_addr": (step.host, "SLURM_STEP_NODELIST"),
                "master_port": (step.port, "SLURM_JOB_ID"),
                "rdzv_id": (step.name, "SLURM_JOB_ID"),
            }
        )
    nodes_text = take("nnodes", 1)
    least, most = parse_nodes(nodes_text, origins["nnodes"])
    procs_text = take("nproc_per_node", 1)
    procs = parse_processes(procs_text, origins["nproc_per_node"], devices, cores)
    endpoint = take("rdzv_endpoint")
    address, port = take("master_addr"), take("master_port", DEFAULT_PORT)
    node_rank, rdzv_id, restarts = take("node_rank"), take("rdzv_id", "forge"), take("max_restarts", 0)
    assert endpoint is None or isinstance(endpoint, str)
    assert address is None or isinstance(address, str)
    assert isinstance(port, int)
    assert isinstance(rdzv_id, str)
    assert isinstance(restarts, int)
    assert node_rank is None or isinstance(node_rank, int)

    backend = found.environ.get("PET_RDZV_BACKEND", "").strip()
    if backend not in ("", "static", "c10d"):
        raise LaunchError(f"PET_RDZV_BACKEND={backend} is not supported: leave it out, or use c10d with PET_RDZV_ENDPOINT")
    endpoint = _rendezvous_endpoint(found, origins, endpoint, address, port, elastic=least != most)
    # Nodes that are numbered need no rendezvous that numbers them: the endpoint is where node 0 listens.
    static = endpoint is not None and origins["node_rank"] == "argument"
    if static:
        address, port = host_and_port(str(endpoint))
        endpoint = None
    if endpoint is None and most == 1 and not static:
        _refuse_unused_addresses(origins, found, most * procs)
    if endpoint is None and (most > 1 or static):
        missing = [name for name, value in (("master_addr", address), ("node_rank", node_rank)) if value is None]
        if missing:
            raise LaunchError(
                f"{_describe(origins, 'nnodes', nodes_text)} asks for {most} nodes, and nothing says "
                f"{' and '.join(missing)}: set master_addr (the host of node 0) and node_rank (or PET_MASTER_ADDR and "
                "PET_NODE_RANK), or rdzv_endpoint"
            )
        assert node_rank is not None
        if node_rank >= most:
            raise LaunchError(
                f"{_describe(origins, 'node_rank', node_rank)} is not one of the {most} node{'s' * (most > 1)} of "
                f"{_describe(origins, 'nnodes', nodes_text)}: nodes are counted from 0"
            )
    fixed = endpoint is None
    meeting = static or most > 1 or origins["master_addr"] == "argument"
    master = (address, port) if fixed and address is not None and meeting else None
    return Topology(
        role="single" if most == 1 and procs == 1 and endpoint is None and not static else "launcher",
        world_size=most * procs if least == most else None,
        local_world_size=procs,
        node_rank=(node_rank or 0) if fixed else None,
        min_nodes=least,
        max_nodes=most,
        nproc_per_node=procs,
        master=master,
        rdzv_endpoint=endpoint,
        rdzv_id=rdzv_id,
        max_restarts=restarts,
        connect_seconds=found.settings.connect_seconds,
        stall_timeout=found.settings.stall_timeout,
        cores=cores,
        origins=origins,
    )


def _rendezvous_endpoint(
    found: LaunchValues, origins: dict[str, str], endpoint: str | None, address: str | None, port: int, *, elastic: bool
) -> str | None:
    """Return HOST:PORT of the rendezvous; None where nodes meet at the master's address."""
    if endpoint is not None and origins["master_addr"] == "argument":
        if origins["rdzv_endpoint"] == "argument":
            raise LaunchError("rdzv_endpoint and master_addr are two places to meet: set one of them")
        endpoint = None
    if endpoint is not None and origins["master_port"] == "argument":
        raise LaunchError(
            f"master_port has no effect with {origins['rdzv_endpoint'].replace('argument', 'rdzv_endpoint')}, which says the "
            "port itself: leave it out, or set master_addr instead"
        )
    if elastic and origins["node_rank"] == "argument":
        raise LaunchError("node_rank has no effect in an elastic run, where nodes are numbered as they come: leave it out")
    if elastic and endpoint is None:
        if address is None:
            raise LaunchError(
                f"an elastic run ({_describe(origins, 'nnodes', found.value('nnodes')[0])}) needs a place to meet: set "
                "rdzv_endpoint to HOST:PORT (or PET_RDZV_ENDPOINT)"
            )
        endpoint = f"{address}:{port}"
    if endpoint is not None and not endpoint.rpartition(":")[2].isdecimal():
        endpoint = f"{endpoint}:{DEFAULT_PORT}"
    if endpoint is not None and int(endpoint.rpartition(":")[2]) not in PORTS:
        raise LaunchError(
            f"{_describe(origins, 'rdzv_endpoint', endpoint)} ends in no port: ports are {PORTS[0]} to {PORTS[-1]}"
        )
    return endpoint


def host_and_port(endpoint: str) -> tuple[str, int]:
    """Return the host and the port of HOST:PORT; an IPv6 address stands in brackets.

    >>> host_and_port("[::1]:29500")
    ('::1', 29500)
    """
    host, _, port = endpoint.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _refuse_unused_addresses(origins: dict[str, str], found: LaunchValues, world_size: int) -> None:
    """Refuse addresses and node numbers on one node, where no other node has to be met.

    In a partial environment they are a sign of more nodes.
    """
    for name in ("master_addr", "master_port", "node_rank", "rdzv_id"):
        origin = origins[name]
        if origin == "argument" and not (name == "node_rank" and found.settings.node_rank == 0):
            if name in ("master_addr", "master_port") and world_size > 1:
                if origins["master_addr"] == "argument":
                    continue
                raise LaunchError(
                    f"{name} has no effect on one node, which picks a free port: leave it out, or set master_addr too"
                )
            raise LaunchError(f"{name} has no effect on one node: leave it out, or set nnodes")
        if origin in ("PET_MASTER_ADDR", "PET_NODE_RANK") and origins["nnodes"] == "default":
            raise LaunchError(
                f"the environment sets {origin} and not PET_NNODES: set both or neither (nnodes=1 says that this node is alone)"
            )
    rank, origin = found.value("node_rank", 0)
    if origin == "PET_NODE_RANK" and origins["nnodes"] == "PET_NNODES" and rank != 0:
        raise LaunchError(f"PET_NODE_RANK={rank} contradicts PET_NNODES=1, which has node 0 only")


def _worker(settings: LaunchSettings, worker: Worker, cores: int) -> Topology:
    return Topology(
        role="worker",
        rank=worker.rank,
        world_size=worker.world_size,
        local_rank=worker.local_rank,
        local_world_size=worker.local_world_size,
        node_rank=worker.node_rank,
        node_known=worker.node_known,
        min_nodes=worker.nodes,
        max_nodes=worker.nodes,
        nproc_per_node=worker.local_world_size,
        master=worker.master,
        rdzv_id=worker.name or "forge",
        connect_seconds=settings.connect_seconds,
        stall_timeout=settings.stall_timeout,
        cores=cores,
        origins=worker.origins,
    )


def _slurm_worker(step: SlurmStep, settings: LaunchSettings) -> Worker:
    for name, value, here in (
        ("nproc_per_node", settings.nproc_per_node, step.local_tasks),
        ("node_rank", settings.node_rank, step.node),
    ):
        if value is not None and value != here:
            raise LaunchError(
                f"{name}={value} contradicts srun, which started {step.local_tasks} tasks on this node ({step.node})"
            )
    return Worker(
        rank=step.task,
        world_size=step.tasks,
        local_rank=step.local_task,
        local_world_size=step.local_tasks,
        node_rank=step.node,
        nodes=step.nodes,
        # On one node the ranks meet where no other machine can listen in.
        master=(settings.master_addr or (step.host if step.nodes > 1 else "127.0.0.1"), settings.master_port or step.port),
        name=settings.rdzv_id or step.name,
        origins={"nproc_per_node": "SLURM_STEP_TASKS_PER_NODE", "nnodes": "SLURM_STEP_NUM_NODES", "node_rank": "SLURM_NODEID"},
        node_known=True,
    )


def _refuse_partial_environment(environ: Mapping[str, str], settings: LaunchSettings) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK"):
        if environ.get(name, "").strip():
            raise LaunchError(f"the environment sets {name}={environ[name]} and not RANK: set both or neither")
    # accelerate launch names a port only where several processes were asked for; without MPI it starts one on the CPU.
    port = environ.get("MASTER_PORT", "").strip()
    if port and environ.get("ACCELERATE_USE_CPU", "").strip() and settings.nproc_per_node is None:
        raise LaunchError(
            f"accelerate launch was asked for several processes (MASTER_PORT={port}) and started this one alone, as it does "
            "without MPI and without --multi_gpu: leave accelerate out and set nproc_per_node to the number of processes (1 to "
            "stay alone), or use accelerate launch --multi_gpu, which starts them on a CPU too"
        )


def _refuse_lone_pod(environ: Mapping[str, str], settings: LaunchSettings) -> None:
    """Refuse a pod of an indexed Kubernetes job that nobody told of the other pods."""
    pod = environ.get("JOB_COMPLETION_INDEX", "").strip()
    if pod not in ("", "0") and settings.nnodes is None and not environ.get("PET_NNODES", "").strip():
        raise LaunchError(
            f"this is pod {pod} of an indexed Kubernetes job (JOB_COMPLETION_INDEX), and PET_NNODES is not set: each pod would "
            "train alone. Kubeflow sets PET_* where the TrainJob has spec.trainer; nnodes=1 says that this pod is alone"
        )


def _describe(origins: Mapping[str, str], name: str, value: object) -> str:
    return f"{origins[name].replace('argument', name).replace('default', name)}={value}"


def _cores() -> int:
    # What a container or taskset grants, where the system says it; the machine's number otherwise (macOS).
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
