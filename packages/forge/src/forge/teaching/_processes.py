"""Parts of a stored teacher → processes of this node, each of which writes a share."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Mapping, Sequence

import attrs

import forge_accel
import forge_dist
from forge._error_families import ERRORS
from forge._errors import PreemptedError, SettingsError
from forge.tasks.items._stored_teacher import RECORD
from forge.teaching._asked import Asking
from forge.teaching._output import TeacherOutput

_JOB, _LOGS = "job.json", ".logs"


def processes(number: int | str | None) -> forge_dist.Topology:
    """Return the processes that ask: this one, or some that it starts. Raises SettingsError."""
    try:
        settings = forge_dist.LaunchSettings(nproc_per_node=number or 1)
        devices = forge_accel.device_count("auto") if number in ("auto", "gpu") else 0
        return forge_dist.topology(settings, environ={}, devices=devices)
    except (TypeError, ValueError) as error:
        raise SettingsError(f"{error}.") from error


def ask_by_processes(
    asking: Asking, parts: Mapping[int, Sequence[int]], output: TeacherOutput, where: forge_dist.Topology
) -> None:
    """Write parts, by their numbers, of these samples each.

    Raises:
        SystemExit: a signal came.
        Exception: what the first process that failed raised.
    """
    logs, ranks = output.folder / _LOGS, where.world_size or 1
    logs.mkdir(exist_ok=True)
    shares = [dict(list(parts.items())[rank::ranks]) for rank in range(ranks)]
    job = {"asking": attrs.asdict(asking), "folder": str(output.folder), "key": output.start(), "shares": shares}
    (logs / _JOB).write_text(json.dumps(job), encoding="utf-8")
    received: list[int] = []
    worker = ["-m", "forge.teaching._worker", str(logs / _JOB)]
    try:
        status = forge_dist.launch(where, worker, log_dir=logs, signals=received, families=ERRORS)
    except Exception as error:
        # Of a process that died the log stays.
        if not isinstance(error, forge_dist.WorkerError):
            shutil.rmtree(logs, ignore_errors=True)
            if not any(output.folder.glob("part_*")):
                (output.folder / RECORD).unlink(missing_ok=True)
        raise
    shutil.rmtree(logs, ignore_errors=True)
    if status == PreemptedError.exit_status:
        number = received[0] if received else signal.SIGTERM
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)
