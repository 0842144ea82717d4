"""Variables of an MPI launcher → those by which torchrun tells a worker its rank."""

from collections.abc import Mapping

from forge_dist._errors import LaunchError
from forge_dist.environment._environment import read_int

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_LAUNCHERS = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MVAPICH2": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""MPI → its names of a process's rank, the number of processes, and both of them on this node."""


def mpi_worker(environ: Mapping[str, str]) -> dict[str, str] | None:
    """Return the variables of a worker that mpirun started; None where it started at most one.

    Raises:
        LaunchError: mpirun started several processes, and nothing says where they meet; or a variable is missing.

    >>> one = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    >>> mpi_worker({**one, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "29500"})["RANK"]
    '1'
    """
    for kind, names in _LAUNCHERS.items():
        size = read_int(environ, names[1])
        if size is None or size < 2 or (names[1] == "PMI_SIZE" and environ.get("SLURM_STEP_NUM_TASKS", "").strip()):
            continue  # srun may set PMI's variables too, and says more by its own
        meeting = {name: environ.get(name, "").strip() for name in ("MASTER_ADDR", "MASTER_PORT")}
        unset = [name for name, value in meeting.items() if not value]
        if unset:
            raise LaunchError(
                f"mpirun started {size} processes ({names[1]}={size}), each of which would train alone, for nothing says where "
                f"they meet: set {' and '.join(unset)} for all of them, or start one process on each node and set "
                "nproc_per_node and nnodes, or use torchrun"
            )
        found = {ours: environ.get(theirs, "").strip() for ours, theirs in zip(_NAMES, names, strict=True)}
        missing = [theirs for ours, theirs in zip(_NAMES, names, strict=True) if not found[ours]]
        if missing:
            raise LaunchError(f"{kind} started {size} processes, and {' and '.join(missing)} is not set: use torchrun instead")
        return {**found, **meeting}
    return None
