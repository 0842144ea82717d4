"""A launcher's topology and a command line → the workers of this node, started, watched and ended; or their own exception.

torch's elastic agent does the work, as a library: nothing is looked up on PATH.
"""

import gc
import importlib
import logging
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from forge_dist._errors import LaunchError
from forge_dist.environment._topology import Topology
from forge_dist.environment._worker import PROMISED
from forge_dist.launching._root_cause import Failure, cause_of, description, error_of
from forge_dist.launching._signals import signals_held
from forge_dist.ranks._failure_report_from_report import PREEMPTED, read_report

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from forge_dist.launching._logs import Logs
    from forge_dist.launching._rendezvous import Meeting
    from forge_dist.launching._supervisor import Overseer

# How long launchers that ended well wait for each other, so that the one that hosts the store does not take it away.
_GOODBYE_SECONDS = 60.0
# Which signals torch's agent takes for itself, to kill the workers after 30 seconds.
_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def launch(topology: Topology, arguments: Sequence[str], *, log_dir: Path, environ: Mapping[str, str] | None = None) -> int:
    """Run this Python with `arguments` as each of this node's ranks, and wait until all of them ended.

    Each worker's output goes to `log_dir/rank_N.log` (appended), rank 0's also to this process's own. SIGTERM and SIGINT are passed on to
    the workers, which decide what to do; no one is killed for taking long to save.

    Args:
        topology: a launcher's.
        arguments: what follows `python` on the workers' command line, such as `["-m", "package", "verb"]`.
        log_dir: folder for the logs; made if it is not there.
        environ: variables that the workers get besides this process's own.

    Returns:
        0, or 75 if the workers left early because a signal asked them to (`SystemExit(75)` under `worker_report`).

    Raises:
        LaunchError: the nodes did not meet.
        WorkerError: a rank was killed, or left without saying why.
        Exception: the first failing rank's own, its message ending in its rank and host.
    """
    if topology.role != "launcher":
        raise LaunchError(f"launch() is for a launcher, and this process is {topology.role}")
    # Two seconds of imports, and only in launchers; a signal that comes meanwhile ends this before anything is started.
    with signals_held() as came:
        from forge_dist.launching._logs import Logs
        from forge_dist.launching._rendezvous import make_rendezvous
        from forge_dist.launching._supervisor import Interrupted

        importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    if came:
        return PREEMPTED

    log_dir = Path(os.path.abspath(log_dir))
    log_dir.mkdir(parents=True, exist_ok=True)
    # Reports go to the machine's own temporary folder: the disk of the run may be what is full.
    with _quiet(), tempfile.TemporaryDirectory(prefix="forge-") as reports:
        try:
            meeting = make_rendezvous(topology)
            with Logs(log_dir, Path(reports), meeting, _environment(topology, environ or {})) as logs:
                return _run(topology, arguments, meeting, logs)
        except Interrupted:
            return PREEMPTED
        finally:
            gc.collect()


def _run(topology: Topology, arguments: Sequence[str], meeting: "Meeting", logs: "Logs") -> int:
    result, overseer = _agent(topology, arguments, meeting, logs)
    logs.close()
    if not result.is_failed():
        marks = [read_report(path) or {} for path in logs.report_of.values()]
        return PREEMPTED if any(mark.get("preempted") for mark in marks) else 0
    cause = cause_of([_failure(rank, failure, logs, overseer) for rank, failure in result.failures.items()])
    if _asked_for(cause, overseer.signals):
        return PREEMPTED
    from forge_dist.launching._root_cause_from_cause import shared_cause

    raise error_of(shared_cause(meeting, description(cause))) from None


def _agent(topology: Topology, arguments: Sequence[str], meeting: "Meeting", logs: "Logs") -> tuple["RunResult", "Overseer"]:
    """Run torch's agent. Returns its result, and what was seen meanwhile."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from forge_dist.launching._supervisor import AFTER_FAILURE_SECONDS, Overseer

    spec = WorkerSpec(
        role="forge",
        local_world_size=topology.nproc_per_node,
        rdzv_handler=meeting,
        entrypoint=sys.executable,
        args=tuple(arguments),
        max_restarts=topology.max_restarts,
    )
    patience = int(AFTER_FAILURE_SECONDS)
    agent = LocalElasticAgent(spec, logs_specs=logs, exit_barrier_timeout=_GOODBYE_SECONDS, shutdown_timeout=patience)
    overseer = Overseer(meeting, lambda: [worker.id for worker in agent.get_worker_group().workers if worker.id is not None])
    with overseer.watching():
        result = agent.run()
    if result is None:
        raise LaunchError("this node came too late: the run has as many nodes as it takes")
    return result, overseer.with_nobody()


def _failure(rank: int, failure: "ProcessFailure", logs: "Logs", overseer: "Overseer") -> Failure:
    report = read_report(logs.report_of[failure.local_rank])
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        exitcode=failure.exitcode,
        ended=overseer.ended.get(failure.pid, time.time()),
        stopped=failure.pid in overseer.stopped,
        report=report if report is not None and "class" in report else None,
        log=logs.log_of[failure.local_rank],
    )


def _asked_for(cause: Failure, signals: Sequence[int]) -> bool:
    """Whether a worker left because it was told to, in a way that left no mark: before it listened to signals, or at once."""
    if cause.report is not None:
        return bool(signals) and cause.report["class"] == "KeyboardInterrupt"
    return cause.exitcode == PREEMPTED or -cause.exitcode in signals


def _environment(topology: Topology, environ: Mapping[str, str]) -> dict[str, str]:
    """What the workers get besides this process's own variables."""
    given = dict(environ)
    if "OMP_NUM_THREADS" not in os.environ:
        # As many threads as cores in each of several processes would only fight for them.
        given.setdefault("OMP_NUM_THREADS", str(max(1, topology.cores // topology.nproc_per_node)))
    if topology.world_size is not None:
        given[PROMISED] = str(topology.world_size)
    return given


@contextmanager
def _quiet() -> Iterator[None]:
    """The agent's own notes off, and its handlers of signals: what it would say is raised here, and signals are the workers' affair."""
    logger = logging.getLogger("torch.distributed.elastic")
    handler, propagate = logging.NullHandler(), logger.propagate
    before = os.environ.get(_SIGNALS)
    logger.addHandler(handler)
    logger.propagate = False
    os.environ[_SIGNALS] = ""
    try:
        with warnings.catch_warnings():
            # torch's agent leaves the pipes that it opened for its workers to the garbage collector.
            warnings.filterwarnings("ignore", message="unclosed file .*/dev/fd/", category=ResourceWarning)
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
        if before is None:
            del os.environ[_SIGNALS]
        else:
            os.environ[_SIGNALS] = before
