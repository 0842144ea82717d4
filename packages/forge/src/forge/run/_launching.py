"""Settings and the body of a run → that body on every rank.

Ranks are this process, processes started here, or this one of those that torchrun started.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

import forge_accel
import forge_dist
from forge._error_families import ERRORS
from forge._errors import ForgeError, PreemptedError, SettingsError
from forge._result import RunResult, read_result
from forge.locking._run_lock import unwritable
from forge.run._rows import Rows, tokenize_rows
from forge.saving._directories import make_directories, next_start, remove_empty
from forge.saving._room import no_room
from forge.settings._recipe import as_values
from forge.settings._settings import resolve
from forge.tasks._task import Task
from forge.trackers._callbacks import Callbacks

PREEMPTED = PreemptedError.exit_status
_INTERRUPT = signal.SIGINT.name
ROWS = "rows"
"""Folder beside the settings in which a launcher leaves the stores of rows that were given in memory."""


def on_ranks(
    task: Task, s: Any, rows: Rows, callbacks: Callbacks, body: Callable[[Any, forge_dist.Ranks], RunResult]
) -> RunResult:
    """Run `body` on the ranks of settings and environment; return the first one's result.

    Rows in memory are tokenized by a launcher, before it starts its ranks. It calls the callbacks too, with what its first rank
    writes.

    Raises:
        forge_dist.LaunchError: settings and environment contradict each other, or the ranks do not meet.
        PreemptedError: the run was asked to stop, and its state is saved.
        Exception: what a rank raised, with its rank and host.

    """
    where = forge_dist.topology(s.launch, devices=_devices(s))
    s = _with_origins(s, where)
    if where.role == "launcher":
        with callbacks.following(Path(s.checkpoints.ckpt_output_dir) / "metrics.jsonl"):
            result = _launch(task, s, rows, where)
        callbacks.end(result)
        return result
    with forge_dist.worker_report(), forge_dist.join(where, log_dir=_log_dir(Path(s.checkpoints.ckpt_output_dir))) as ranks:
        return body(s, ranks)


def preempted(path: Path, why: str, failed: str | None = None, rescued: Path | None = None, remedy: str = "") -> PreemptedError:
    """Return the error of a run that was asked to stop.

    Args:
        path: the run directory.
        why: what asked.
        failed: why its state was not saved there.
        rescued: the state in emergency_dir.
        remedy: what the same command does, and what lets it be saved.

    """
    latest = path / "full_state" / "latest"
    if rescued is not None:
        error = PreemptedError(
            f"stopped by {why}: its state could not be saved ({failed}), and is in {rescued} (emergency_dir). The same command "
            "resumes it."
        )
        error.received = why
        return error
    if not latest.exists():
        said = f"stopped by {why} before there was a state to resume from"
        error = PreemptedError(
            f"{said}: {next_start(path)}"
            if failed is None
            else f"{said}. Its state could not be saved ({failed}). {remedy}".rstrip()
        )
        # As a process that the signal ended.
        error.exit_status = 130 if why == _INTERRUPT else 143  # type: ignore[misc]
        error.received = why
        return error
    state = latest.read_text(encoding="utf-8").strip()
    error = PreemptedError(
        f"stopped by {why}: {path / 'full_state' / state} holds the state to resume from; the same command resumes it."
        if failed is None
        else f"stopped by {why}: its state could not be saved ({failed}). {remedy}".rstrip()
    )
    error.received = why
    return error


def write_settings(s: Any, file: Path) -> None:
    """Write composed settings with their origins, for a process of this very version."""
    values = {name: value for name, value in as_values(s).items() if s.origins[name] != "default"}
    file.write_text(json.dumps({"values": values, "origins": dict(s.origins)}), encoding="utf-8")


def read_settings(task: Task, file: Path) -> Any:
    """Read what `write_settings` wrote."""
    found = json.loads(file.read_text(encoding="utf-8"))
    s = resolve(task.settings, *((found["origins"][name], {name: value}) for name, value in found["values"].items()))
    return attrs.evolve(s, origins=found["origins"])


def _devices(s: Any) -> int:
    """Count the accelerators if the number of processes depends on it, for it imports torch."""
    requested = s.launch.nproc_per_node or os.environ.get("PET_NPROC_PER_NODE", "").strip()
    return forge_accel.device_count(s.device.device) if requested in ("auto", "gpu") else 0


def _with_origins(s: Any, where: forge_dist.Topology) -> Any:
    """Write launch settings that came from the environment into the settings, with their origin."""
    known = attrs.asdict(where)
    for name, origin in where.origins.items():
        if origin not in ("argument", "default") and name in known and getattr(s.launch, name, None) is None:
            s = s.with_value("launch", name, known[name])
            s = attrs.evolve(s, origins={**s.origins, name: f"environment: {origin}"})
    return s


def _log_dir(path: Path) -> Path:
    """Return the folder of this process's logs in a run directory."""
    # Containers may have one name, and the same numbers of processes.
    here = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(2)}"
    return path / "logs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{here}"


def _check_main(s: Any) -> None:
    """Refuse functions of the calling script, which ranks in processes of their own have not.

    Raises:
        SettingsError: naming the setting, and the form that works.

    """
    for name, value in as_values(s).items():
        for part in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(part, str) and part.startswith("__main__:"):
                file = getattr(sys.modules["__main__"], "__file__", None)
                function = part.partition(":")[2]
                how = (
                    f'name it {Path(file).stem + ":" + function!r}, and call forge under `if __name__ == "__main__":`'
                    if file is not None
                    else f"put it into a file that can be imported, and name it 'file:{function}'"
                )
                raise SettingsError(
                    f"{name}={part}: each of several ranks is a process of its own, whose __main__ is not this one; {how}."
                )


def _launch(task: Task, s: Any, rows: Rows, where: forge_dist.Topology) -> RunResult:
    """Start the ranks of this node as processes, wait for them, and read the result."""
    _check_main(s)
    path = Path(s.checkpoints.ckpt_output_dir)
    logs = _log_dir(path)
    settings = logs / "settings.json"
    made: list[Path] = []
    try:
        made += make_directories(path)
        made += make_directories(logs)
        if rows:
            s = tokenize_rows(task, s, rows, logs / ROWS)
        try:
            write_settings(s, settings)
        except OSError as error:
            raise unwritable(f"ckpt_output_dir {path}", error) from error
        # What this process can import, its workers can: a script's own folder, for example, for `preprocess`.
        paths = {"PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path)}
        worker = ["-m", "forge.cli._worker", type(task).__module__, task.name, str(settings)]
        received: list[int] = []
        status = forge_dist.launch(where, worker, log_dir=logs, environ=paths, signals=received, families=ERRORS)
        if status == PREEMPTED:
            raise preempted(path, signal.Signals(received[0]).name if received else "a signal")
    except BaseException as error:
        refused = getattr(error, "exit_status", None) == ForgeError.exit_status
        # A rank that died is named with its log, which then stays, however early it was.
        named = isinstance(error, forge_dist.WorkerError)
        begun = (path / "config.yaml").exists()
        if refused or not (named or begun):
            shutil.rmtree(logs, ignore_errors=True)
            remove_empty([folder for folder in made if folder != logs])
        if named:
            again = next_start(path)
            error.args = (f"{error}\n{again[0].upper()}{again[1:]}",)
        if isinstance(error, Exception) and (found := no_room(error, path, begun=begun)) is not None:
            raise found from error
        raise
    finally:
        shutil.rmtree(logs / ROWS, ignore_errors=True)
    return read_result(path)
