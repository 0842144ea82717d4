"""RANK and its companions, as torchrun and this package's launcher set them → which worker this is, or a refusal that names what is missing."""

from collections.abc import Mapping

import attrs

from forge_dist._errors import LaunchError
from forge_dist._settings import LaunchSettings
from forge_dist.environment._counts import nodes_of
from forge_dist.environment._environment import number_of, port_of

# Set by this package's launcher for a run of fixed size: how many ranks were promised.
PROMISED = "FORGE_WORLD_SIZE"


@attrs.frozen(kw_only=True)
class Started:
    """What a launcher said to a process that it started."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    nodes: int
    master: tuple[str, int] | None
    origins: Mapping[str, str]


def worker_of(environ: Mapping[str, str], settings: LaunchSettings) -> Started:
    """Read RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR and MASTER_PORT.

    Raises:
        LaunchError: one is missing or no number, they contradict each other, or a setting contradicts them.
    """
    rank, world_size = number_of(environ, "RANK"), number_of(environ, "WORLD_SIZE")
    assert rank is not None
    if world_size is None:
        raise LaunchError(f"the environment sets RANK={rank} and not WORLD_SIZE: set both or neither")
    if rank >= world_size:
        raise LaunchError(f"the environment says RANK={rank} of WORLD_SIZE={world_size}: ranks are counted from 0")
    alone = world_size == 1
    local_rank = number_of(environ, "LOCAL_RANK")
    missing = [name for name in ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT") if not environ.get(name, "").strip()]
    if missing and not alone:
        raise LaunchError(
            f"the environment says RANK={rank} of WORLD_SIZE={world_size} and not {' nor '.join(missing)}: torchrun sets all of them;"
            " without RANK and WORLD_SIZE, nnodes and nproc_per_node (or PET_*) start the ranks"
        )
    local_rank = local_rank or 0
    # A launcher that does not say how many it started here: all of them.
    local_world_size = number_of(environ, "LOCAL_WORLD_SIZE") or world_size
    if local_world_size > world_size or local_rank >= local_world_size:
        raise LaunchError(
            f"the environment says LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_world_size} with WORLD_SIZE={world_size}, which"
            " cannot be"
        )
    promised = number_of(environ, PROMISED)
    if promised is not None and promised != world_size:
        raise LaunchError(
            f"{promised} ranks were asked for and {world_size} came together: nproc_per_node must be the same on every node"
        )
    nodes = number_of(environ, "GROUP_WORLD_SIZE") or max(1, world_size // local_world_size)
    node_rank = number_of(environ, "GROUP_RANK")
    _compare(settings, local_world_size, world_size)
    if alone and promised is None:
        _refuse_lonely(environ, settings)
    port = port_of(environ, "MASTER_PORT")
    return Started(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size if node_rank is None else node_rank,
        nodes=nodes,
        master=None if port is None else (environ.get("MASTER_ADDR", "").strip() or "127.0.0.1", port),
        origins={"nproc_per_node": "LOCAL_WORLD_SIZE", "nnodes": "WORLD_SIZE", "node_rank": "GROUP_RANK"},
    )


def _refuse_lonely(environ: Mapping[str, str], settings: LaunchSettings) -> None:
    """A world of one, beside variables that ask for more and no setting that outranks them, would train a model of its own in silence."""
    nodes, procs = (environ.get(name, "").strip() for name in ("PET_NNODES", "PET_NPROC_PER_NODE"))
    for name, text, chosen, least in (
        ("PET_NNODES", nodes, settings.nnodes, nodes_of(nodes or 1, "PET_NNODES")[0]),
        ("PET_NPROC_PER_NODE", procs, settings.nproc_per_node, _plain(procs) or 1),
    ):
        if chosen is None and least > 1:
            raise LaunchError(
                f"the environment says WORLD_SIZE=1, one process in all, and {name}={text}: unset RANK and WORLD_SIZE to start what"
                f" PET_* asks for, or set {name.removeprefix('PET_').lower()}=1 to stay alone"
            )


def _compare(settings: LaunchSettings, local_world_size: int, world_size: int) -> None:
    """A number that was asked for must be what a launcher started; words such as "auto" are the launcher's to read."""
    procs, nodes = (_plain(value) for value in (settings.nproc_per_node, settings.nnodes))
    if procs is not None and procs != local_world_size:
        raise LaunchError(f"nproc_per_node={procs} contradicts the launcher, which started LOCAL_WORLD_SIZE={local_world_size}")
    if nodes is not None and nodes * local_world_size != world_size:
        raise LaunchError(
            f"nnodes={nodes} contradicts the launcher, which started WORLD_SIZE={world_size} with LOCAL_WORLD_SIZE={local_world_size}"
        )


def _plain(value: int | str | None) -> int | None:
    return int(value) if value is not None and str(value).isdecimal() else None
