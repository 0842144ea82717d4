"""SLURM's variables: nodes, tasks, this node and task, address to meet at.

Without `scontrol`.
"""

import re
from collections.abc import Mapping

import attrs

from forge_dist._errors import LaunchError

# Two jobs on one node, and two steps of one job, must not meet on one port, and all nodes of a step must find the same one
# without asking. The stride has no divisor in common with the number of ports, and is longer than a row of jobs on one node.
_PORTS = range(20000, 30000)
_STEP_STRIDE = 1009


@attrs.frozen(kw_only=True)
class SlurmStep:
    """One task of a SLURM step, as `srun` describes it."""

    nodes: int
    """Number of nodes of the step."""
    node: int
    """This node's number, from 0."""
    tasks: int
    """Number of tasks of the step, over all nodes."""
    task: int
    """This task's number, from 0."""
    local_task: int
    """This task's number on its node, from 0."""
    local_tasks: int
    """Number of tasks on this node."""
    host: str
    """Name of the first node."""
    port: int
    """Port derived from the numbers of the job and the step."""
    name: str
    """Name of the step, by which its ranks are told from another step's at the same port."""


def slurm_step(environ: Mapping[str, str], *, processes_asked: bool = False) -> SlurmStep | None:
    """Return the step of several tasks that `srun` started this process in.

    None outside of SLURM and in a step of one task.

    Args:
        environ: the environment's variables.
        processes_asked: whether a setting or PET_NPROC_PER_NODE gives the number of processes per node, so that a job of
            several tasks on one node needs no srun.

    Raises:
        LaunchError: a job of several nodes or tasks in which no srun started this process; variables that are missing, are no
            numbers, or contradict each other.
    """
    tasks, task = _read_int(environ, "SLURM_STEP_NUM_TASKS"), _read_int(environ, "SLURM_PROCID") or 0
    if tasks is None and task:
        tasks = _read_int(environ, "SLURM_NTASKS")
        if tasks is None:
            raise LaunchError(
                f"the environment says SLURM_PROCID={task}, and neither SLURM_STEP_NUM_TASKS nor SLURM_NTASKS of how many"
            )
    _check_range("SLURM_PROCID", task, tasks, "tasks")
    if tasks is None:
        # sbatch runs its script on the first node only, with SLURM_PROCID=0; salloc's shell runs on none of them.
        nodes = _read_int(environ, "SLURM_NNODES")
        if nodes is not None and nodes > 1:
            raise LaunchError(
                f"the environment says SLURM_NNODES={nodes}, and no srun started this process: the other nodes would stay "
                "idle. Start it with srun --ntasks-per-node=1, or set nnodes=1 to use this node alone"
            )
        asked = _read_int(environ, "SLURM_NTASKS")
        if asked is not None and asked > 1 and not processes_asked:
            raise LaunchError(
                f"the environment says SLURM_NTASKS={asked}, and no srun started this process, which would train alone: "
                "start it with srun, or set nproc_per_node to as many processes as it shall start here (1 to stay alone)"
            )
        return None
    if tasks == 1:
        return None
    nodes = _required(environ, "SLURM_STEP_NUM_NODES", "SLURM_NNODES")
    node = _required(environ, "SLURM_NODEID")
    hosts = environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    if not hosts:
        raise LaunchError(
            "the environment says that srun started several tasks, and neither SLURM_STEP_NODELIST nor SLURM_JOB_NODELIST "
            "says where"
        )
    _check_range("SLURM_NODEID", node, nodes, "nodes")
    counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    local_task = _read_int(environ, "SLURM_LOCALID") or 0
    local_tasks = _tasks_of(counts, node) if counts else tasks // nodes
    _check_range("SLURM_LOCALID", local_task, local_tasks, "tasks of its node")
    job, step = _read_int(environ, "SLURM_JOB_ID") or 0, _read_int(environ, "SLURM_STEP_ID") or 0
    return SlurmStep(
        nodes=nodes,
        node=node,
        tasks=tasks,
        task=_required(environ, "SLURM_PROCID"),
        local_task=local_task,
        local_tasks=local_tasks,
        host=first_host(hosts),
        port=_port(job, step),
        name=f"slurm-{job}-{step}",
    )


def _port(job: int, step: int) -> int:
    """Return the port of a step.

    >>> _port(4711, 0), _port(4711, 1), _port(4712, 0)
    (24711, 25720, 24712)
    """
    return _PORTS[(job + step * _STEP_STRIDE) % len(_PORTS)]


def first_host(nodes: str) -> str:
    """Return the first name in one of SLURM's lists of nodes.

    >>> first_host("rack[2,7]-gpu[08-11,20],login1")
    'rack2-gpu08'
    """
    first = re.match(r"(?:\[[^\]]*\]|[^,\[])*", nodes.strip())
    name = first.group() if first else ""
    return re.sub(r"\[([^,\-\]]*)[^\]]*\]", r"\1", name)


def _tasks_of(counts: str, node: int) -> int:
    """Return the number of tasks of a node, from a list such as `4(x2),3`."""
    listed: list[int] = []
    for part in counts.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise LaunchError(f"SLURM's tasks per node are {counts!r}, which is no list like 4(x2),3")
        listed += [int(match[1])] * int(match[2] or 1)
    if node >= len(listed):
        raise LaunchError(f"SLURM_NODEID={node} contradicts SLURM's tasks per node {counts!r}, which lists {len(listed)} nodes")
    return listed[node]


def _read_int(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise LaunchError(f"the environment variable {name} is {text!r}, which is no whole number")
    return int(text)


def _check_range(name: str, number: int, count: int | None, of: str) -> None:
    if count is not None and number >= count:
        raise LaunchError(f"the environment says {name}={number}, and SLURM counts {count} {of}, numbered from 0")


def _required(environ: Mapping[str, str], *names: str) -> int:
    for name in names:
        number = _read_int(environ, name)
        if number is not None:
            return number
    raise LaunchError(f"the environment says that srun started several tasks, and {' or '.join(names)} is not set")
