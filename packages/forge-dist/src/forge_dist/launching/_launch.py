"""Launcher of this node's workers, by torch's elastic agent.

torch's elastic agent does the work, as a library: nothing is looked up on PATH.
"""

import gc
import importlib
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge_dist._errors import LaunchError
from forge_dist._temporary import temporary_folder
from forge_dist.environment._topology import Topology
from forge_dist.environment._worker import EXPECTED_WORLD_SIZE
from forge_dist.launching._root_cause import (
    Failure,
    error_of,
    publish_at_once,
    report_of,
    root_cause,
    root_cause_on_all_nodes,
    stall_report,
)
from forge_dist.launching._signals import Interrupted, deferred_signals, forwarded_as
from forge_dist.ranks._failure_report import PREEMPTED, read_report, write_report
from forge_dist.watching._guard import keep_stacks
from forge_dist.watching._watch import Stall, Watched

if TYPE_CHECKING:
    from torch.distributed.elastic.agent.server.api import RunResult
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    from forge_dist.launching._logs import Logs
    from forge_dist.launching._rendezvous import Rendezvous
    from forge_dist.launching._supervisor import Supervisor

# How long launchers that ended well wait for each other, so that the one that hosts the store does not take it away.
_EXIT_BARRIER_SECONDS = 60.0
# The variable with the signals that torch's agent takes for itself, to kill the workers after 30 seconds.
_SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def launch(
    topology: Topology,
    arguments: Sequence[str],
    *,
    log_dir: Path,
    environ: Mapping[str, str] | None = None,
    signals: list[int] | None = None,
    families: Sequence[type[Exception]] = (),
) -> int:
    """Start this Python with `arguments` as each rank of this node, and wait for their end.

    Each worker's output goes to `log_dir/rank_N.log` (appended), rank 0's also to this process's own. SIGTERM and SIGINT are
    forwarded to the workers (SIGHUP and SIGUSR1 as SIGTERM: `signal_that_came` names them), which decide what to do; none is
    killed for taking long to save.

    Args:
        topology: a launcher's.
        arguments: what follows `python` on the workers' command line, such as `["-m", "package", "verb"]`.
        log_dir: folder for the logs; made if it is not there.
        environ: variables that the workers get beside this process's own.
        signals: a list to which the signals that this process received are appended.
        families: base classes of exceptions that are raised here as they were in a worker, beside Python's and this package's;
            any other class becomes a WorkerError that names it.

    Returns:
        0, or 75 if the workers ended early because of a signal (`SystemExit(75)` under `worker_report`). In an elastic run they
        are started again if the signal was another node's.

    Raises:
        MeetingError: the nodes did not meet.
        WorkerError: a rank was killed, or ended without a report.
        Exception: the first failing rank's own, its message ending in its rank and host.
    """
    if topology.role != "launcher":
        raise LaunchError(f"launch() is for a launcher, and this process is {topology.role}")
    # Two seconds of imports, and only in launchers; a signal that comes meanwhile ends this before anything is started.
    with deferred_signals() as received:
        from forge_dist.launching._logs import Logs
        from forge_dist.launching._rendezvous import make_rendezvous

        importlib.import_module("torch.distributed.elastic.agent.server.local_elastic_agent")
    if received:
        return PREEMPTED

    log_dir = Path(os.path.abspath(log_dir))
    log_dir.mkdir(parents=True, exist_ok=True)
    # Reports go to the machine's own temporary folder: the disk of the run may be what is full.
    signals = [] if signals is None else signals
    with _silent_agent(), temporary_folder() as reports:
        try:
            rendezvous = make_rendezvous(topology)
            starts = 0
            while True:
                (folder := reports / str(starts)).mkdir()
                starts += 1
                with Logs(log_dir, folder, rendezvous, _worker_environment(topology, environ or {}), signals) as logs:
                    status = _run(topology, arguments, rendezvous, logs, signals, families)
                if status != PREEMPTED or signals or topology.world_size is not None:
                    return status
                # Another node of an elastic run was asked to stop: the others go on, with the one that replaces it.
        except Interrupted:
            return PREEMPTED
        finally:
            gc.collect()


def _run(
    topology: Topology,
    arguments: Sequence[str],
    rendezvous: "Rendezvous",
    logs: "Logs",
    signals: list[int],
    families: Sequence[type[Exception]],
) -> int:
    result, supervisor = _run_agent(topology, arguments, rendezvous, logs, signals)
    logs.close()
    keep_stacks(list(logs.beats_of.values()), logs.log_dir)
    if supervisor.stopped_at_once:
        return PREEMPTED
    failures = [_failure(rank, failure, logs, supervisor) for rank, failure in result.failures.items()]
    failed = {failure.rank for failure in failures}
    left = (_left_early(local, logs, supervisor.ended) for local, (rank, _) in logs.beats_of.items() if rank not in failed)
    failures += filter(None, left)
    if not failures:
        reports = [read_report(path) or {} for path in logs.report_of.values()]
        return PREEMPTED if any(report.get("preempted") for report in reports) else 0
    cause = root_cause(failures)
    if _was_preempted(cause, supervisor.signals):
        return PREEMPTED
    raise error_of(root_cause_on_all_nodes(rendezvous, report_of(cause)), families) from None


def _run_agent(
    topology: Topology, arguments: Sequence[str], rendezvous: "Rendezvous", logs: "Logs", signals: list[int]
) -> tuple["RunResult", "Supervisor"]:
    """Run torch's agent; return its result, and the supervisor that watched the workers."""
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

    from forge_dist.launching._supervisor import AFTER_FAILURE_SECONDS, Supervisor

    spec = WorkerSpec(
        role="forge",
        local_world_size=topology.nproc_per_node,
        rdzv_handler=rendezvous,
        entrypoint=sys.executable,
        args=tuple(arguments),
        max_restarts=topology.max_restarts,
    )
    # torch 2.11 has no such limit of its own: the supervisor's is as long.
    limited = "shutdown_timeout" in signature(LocalElasticAgent).parameters
    limits: Any = {"shutdown_timeout": int(AFTER_FAILURE_SECONDS)} if limited else {}
    agent = LocalElasticAgent(spec, logs_specs=logs, exit_barrier_timeout=_EXIT_BARRIER_SECONDS, **limits)

    def workers() -> list[Watched]:
        group = agent.get_worker_group().workers
        return [Watched(*logs.beats_of[each.local_rank], each.id) for each in group if each.id is not None]

    def on_stall(stall: Stall) -> None:
        kept = keep_stacks(list(logs.beats_of.values()), logs.log_dir)
        report = stall_report(stall, kept, socket.gethostname())
        write_report(report, next(logs.report_of[local] for local, (rank, _) in logs.beats_of.items() if rank == stall.rank))
        publish_at_once(rendezvous, report)

    def left_early(worker: Watched) -> bool:
        local = next(local for local, (rank, _) in logs.beats_of.items() if rank == worker.rank)
        found = _left_early(local, logs, supervisor.ended)
        if found is not None:
            publish_at_once(rendezvous, report_of(found))
        return found is not None

    supervisor = Supervisor(rendezvous, workers, signals, on_stall, left_early)
    with supervisor.watching():
        result = agent.run()
    if result is None:
        raise LaunchError("this node came too late: the run has as many nodes as it takes")
    return result, supervisor.without_agent()


def _failure(rank: int, failure: "ProcessFailure", logs: "Logs", supervisor: "Supervisor") -> Failure:
    report = read_report(logs.report_of[failure.local_rank])
    return Failure(
        rank=rank,
        host=socket.gethostname(),
        exitcode=failure.exitcode,
        ended=supervisor.ended.get(failure.pid, time.time()),
        killed_by_launcher=failure.pid in supervisor.killed,
        report=report if report is not None and "class" in report else None,
        log=logs.log_of[failure.local_rank],
    )


def _left_early(local_rank: int, logs: "Logs", ended: Mapping[int, float]) -> Failure | None:
    """Return the failure of a worker that ended with status 0 too early, as by `os._exit(0)`.

    Its mark of unfinished work is still there. None for any other.
    """
    report = read_report(logs.report_of[local_rank]) or {}
    if "unfinished" not in report:
        return None
    return Failure(
        rank=logs.beats_of[local_rank][0],
        host=socket.gethostname(),
        exitcode=0,
        ended=ended.get(report["unfinished"], time.time()),
        report=None,
        log=logs.log_of[local_rank],
    )


def _was_preempted(cause: Failure, signals: Sequence[int]) -> bool:
    """Check for a worker that a signal ended before it could record a preemption."""
    if cause.report is not None:
        return bool(signals) and cause.report["class"] == "KeyboardInterrupt"
    return cause.exitcode == PREEMPTED or -cause.exitcode in map(forwarded_as, signals)


def _worker_environment(topology: Topology, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that the workers get beside this process's own."""
    given = dict(environ)
    if topology.threads is not None:
        # As many threads as cores in each of several processes would only fight for them.
        given.setdefault("OMP_NUM_THREADS", str(topology.threads))
    if topology.world_size is not None:
        given[EXPECTED_WORLD_SIZE] = str(topology.world_size)
    return given


@contextmanager
def _silent_agent() -> Iterator[None]:
    """Disable the agent's log and its signal handlers.

    Its failures are raised here, and signals are forwarded to the workers.
    """
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
