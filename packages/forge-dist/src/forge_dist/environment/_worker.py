"""Read the variables by which torchrun and this package's launcher tell a worker its rank."""

from collections.abc import Mapping

import attrs

from forge_dist._errors import LaunchError
from forge_dist._settings import LaunchSettings
from forge_dist.environment._counts import parse_nodes
from forge_dist.environment._environment import read_int, read_port

# Set by this package's launcher for a run of fixed size: the number of ranks that all nodes must make together.
EXPECTED_WORLD_SIZE = "FORGE_WORLD_SIZE"


@attrs.frozen(kw_only=True)
class Worker:
    """One worker, as its launcher described it. Ranks and nodes are counted from 0."""

    rank: int
    """Rank among all."""
    world_size: int
    """Number of ranks."""
    local_rank: int
    """Rank on its node."""
    local_world_size: int
    """Number of ranks on its node."""
    node_rank: int
    """Number of its node."""
    nodes: int
    """Number of nodes."""
    master: tuple[str, int] | None
    """Host and port where the ranks meet."""
    origins: Mapping[str, str]
    """Setting → the variable that it was read from."""
    name: str | None = None
    """Name of the run, where its launcher has one."""
    node_known: bool = False
    """Whether its launcher said which node it is on, and how many ranks that has; else both are computed."""


def read_worker(environ: Mapping[str, str], settings: LaunchSettings) -> Worker:
    """Read the variables of a worker.

    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, GROUP_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.

    Raises:
        LaunchError: one is missing or no number, they contradict each other, or a setting contradicts them.
    """
    rank, world_size = read_int(environ, "RANK"), read_int(environ, "WORLD_SIZE")
    assert rank is not None
    if world_size is None:
        raise LaunchError(f"the environment sets RANK={rank} and not WORLD_SIZE: set both or neither")
    if rank >= world_size:
        raise LaunchError(f"the environment says RANK={rank} of WORLD_SIZE={world_size}: ranks are counted from 0")
    alone = world_size == 1
    local_rank = read_int(environ, "LOCAL_RANK")
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name, "").strip()]
    if missing and not alone:
        raise LaunchError(
            f"the environment says RANK={rank} of WORLD_SIZE={world_size} and not {' nor '.join(missing)}: torchrun sets all "
            "of them; without RANK and WORLD_SIZE, nnodes and nproc_per_node (or PET_*) start the ranks"
        )
    local_rank = local_rank or 0
    # A launcher that does not set it started all ranks here.
    local_world_size = read_int(environ, "LOCAL_WORLD_SIZE") or world_size
    if local_world_size > world_size or local_rank >= local_world_size:
        raise LaunchError(
            f"the environment says LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_world_size} with "
            f"WORLD_SIZE={world_size}, which cannot be"
        )
    expected = read_int(environ, EXPECTED_WORLD_SIZE)
    if expected is not None and expected != world_size:
        raise LaunchError(
            f"{expected} ranks were asked for and {world_size} came together: nproc_per_node must be the same on every node"
        )
    nodes = read_int(environ, "GROUP_WORLD_SIZE") or max(1, world_size // local_world_size)
    node_rank = read_int(environ, "GROUP_RANK")
    check_settings(settings, local_world_size, world_size)
    if alone and expected is None:
        _refuse_unintended_single_rank(environ, settings)
    port = read_port(environ, "MASTER_PORT")
    return Worker(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        nodes=nodes,
        master=None if port is None else (environ.get("MASTER_ADDR", "").strip() or "127.0.0.1", port),
        origins={"nproc_per_node": "LOCAL_WORLD_SIZE", "nnodes": "WORLD_SIZE", "node_rank": "GROUP_RANK"},
        node_known=node_rank is not None and read_int(environ, "LOCAL_WORLD_SIZE") is not None,
    )


def _refuse_unintended_single_rank(environ: Mapping[str, str], settings: LaunchSettings) -> None:
    """Refuse a world of one where PET_* asks for more and no setting outranks it.

    Each such process would silently train a model of its own.
    """
    nodes, procs = (environ.get(name, "").strip() for name in ("PET_NNODES", "PET_NPROC_PER_NODE"))
    for name, text, chosen, least in (
        ("PET_NNODES", nodes, settings.nnodes, parse_nodes(nodes or 1, "PET_NNODES")[0]),
        ("PET_NPROC_PER_NODE", procs, settings.nproc_per_node, _as_int(procs) or 1),
    ):
        if chosen is None and least > 1:
            raise LaunchError(
                f"the environment says WORLD_SIZE=1, one process in all, and {name}={text}: unset RANK and WORLD_SIZE to "
                f"start what PET_* asks for, or set {name.removeprefix('PET_').lower()}=1 to stay alone"
            )


def check_settings(settings: LaunchSettings, local_world_size: int, world_size: int) -> None:
    """Refuse numbers in the settings that differ from what a launcher started.

    Words such as "auto" are for the launcher to interpret.
    """
    procs, nodes = (_as_int(value) for value in (settings.nproc_per_node, settings.nnodes))
    if procs is not None and procs != local_world_size:
        raise LaunchError(f"nproc_per_node={procs} contradicts the launcher, which started LOCAL_WORLD_SIZE={local_world_size}")
    if nodes is not None and nodes * local_world_size != world_size:
        raise LaunchError(
            f"nnodes={nodes} contradicts the launcher, which started WORLD_SIZE={world_size} with "
            f"LOCAL_WORLD_SIZE={local_world_size}"
        )


def _as_int(value: int | str | None) -> int | None:
    return int(value) if value is not None and str(value).isdecimal() else None
