"""Process group that somebody else made in this process → the worker that this process is.

Ray Train, a notebook or a trainer's own script make the group; its ranks are this run's.
"""

import sys
from collections.abc import Mapping
from typing import Any

from forge_dist._errors import LaunchError
from forge_dist._settings import LaunchSettings
from forge_dist.environment._environment import read_int
from forge_dist.environment._worker import Worker, check_settings

# Whether the group of this process was made by this package, for a run that is going on: no program's own.
_ours = False


def note_own_group(*, made: bool) -> None:
    """Note that this package made the process group, or ended it."""
    global _ours  # noqa: PLW0603 - one process has one group
    _ours = made


def existing_worker(environ: Mapping[str, str], settings: LaunchSettings) -> Worker | None:
    """Return the worker that an initialized process group makes of this process.

    None where there is no such group, and for one that this package made. torch is not imported: what is not imported has no
    group.

    Raises:
        LaunchError: RANK, WORLD_SIZE or a setting contradicts the group.
    """
    dist: Any = sys.modules.get("torch.distributed")
    if _ours or dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    rank, world_size = int(dist.get_rank()), int(dist.get_world_size())
    for name, here in (("RANK", rank), ("WORLD_SIZE", world_size)):
        said = read_int(environ, name)
        if said is not None and said != here:
            raise LaunchError(
                f"the environment says {name}={said}, and this process has a process group in which it is rank {rank} of "
                f"{world_size}: unset {name}, or leave the group to this run"
            )
    # Without variables the ranks ask each other when they join which of them share a node.
    local_world_size = read_int(environ, "LOCAL_WORLD_SIZE") or world_size
    check_settings(settings, local_world_size, world_size)
    local_rank = read_int(environ, "LOCAL_RANK")
    return Worker(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local_world_size if local_rank is None else local_rank,
        local_world_size=local_world_size,
        node_rank=rank // local_world_size,
        nodes=max(1, world_size // local_world_size),
        master=None,
        origins=dict.fromkeys(("nproc_per_node", "nnodes", "node_rank"), "the process group of this process"),
    )
