"""The environment → proof that this is the only process, or a refusal that names the variable which says otherwise.

This version trains in one process. N copies of it that know nothing of each other would train N models in silence and write them over
each other, so an environment that asks for more, or that contradicts itself, is refused before anything is loaded.
"""

import os
from collections.abc import Mapping

from forge_dist._errors import LaunchError

# Set for each process by torchrun, by srun and by mpirun: how many were really started.
_STARTED = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")
# Read by torchrun, and by us where no launcher ran: how many are wanted.
_WANTED = ("PET_NNODES", "PET_NPROC_PER_NODE")

_REMEDY = "This version of forge trains in one process: start it once, on one node"


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """The whole number that `name` holds; None where it is unset. Raises LaunchError for any other text."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(f"the environment variable {name} is {text!r}, and 1 is all that is supported. {_REMEDY}.") from None


def require_single_process(environ: Mapping[str, str] | None = None) -> None:
    """Return if `environ` (default: `os.environ`) asks for one process; otherwise refuse by name.

    Reads RANK, WORLD_SIZE and LOCAL_WORLD_SIZE (torchrun), SLURM_STEP_NUM_TASKS (srun), OMPI_COMM_WORLD_SIZE (mpirun) and, where no
    launcher has set RANK, PET_NNODES and PET_NPROC_PER_NODE (Kubeflow), whose open values (`auto`, `gpu`, `1:4`) are refused too.

    Raises:
        LaunchError: more than one process is asked for, or the variables contradict each other.

    >>> require_single_process({"RANK": "0", "WORLD_SIZE": "1"})
    >>> require_single_process({"PET_NNODES": "2"})
    Traceback (most recent call last):
    ...
    forge_dist._errors.LaunchError: the environment asks for PET_NNODES=2. This version of forge trains in one process: start it once, on one node.
    """
    if environ is None:
        environ = os.environ
    started = {name: _number(environ, name) for name in _STARTED}
    rank = _number(environ, "RANK")
    world_size = started["WORLD_SIZE"]
    if (rank is None) != (world_size is None):
        given, absent = ("RANK", "WORLD_SIZE") if world_size is None else ("WORLD_SIZE", "RANK")
        raise LaunchError(f"the environment sets {given}={environ[given]} and not {absent}: set both or neither. {_REMEDY}.")
    # Under a launcher PET_* only says how it was started; WORLD_SIZE is what came of it.
    wanted = {name: _number(environ, name) for name in _WANTED} if rank is None else {}
    for name, number in {**started, **wanted}.items():
        if number is not None and number != 1:
            raise LaunchError(f"the environment asks for {name}={number}. {_REMEDY}.")
    if rank is not None and rank != 0:
        raise LaunchError(f"the environment says RANK={rank} of WORLD_SIZE=1, which has rank 0 only. {_REMEDY}.")
