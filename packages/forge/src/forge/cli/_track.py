"""A run that has ended, and trackers → what they have not got of it is sent to them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs

from forge._errors import RunDirectoryError, SettingsError, TrackingError
from forge.locking._run_lock import RunLock
from forge.saving._directories import run_values
from forge.settings._trackers import TrackerSettings
from forge.trackers._state import read_sent
from forge.trackers._table import check_trackers
from forge.trackers._watchers import Watchers

_SECONDS = 600.0


def track(
    run: str | Path,
    *,
    trackers: Sequence[str] | None = None,
    wandb_project: str | None = None,
    wandb_entity: str | None = None,
    wandb_run_name: str | None = None,
    mlflow_tracking_uri: str | None = None,
    mlflow_experiment_name: str | None = None,
    mlflow_run_name: str | None = None,
    tensorboard_log_dir: str | None = None,
) -> dict[str, int]:
    """Send the record of a run that has ended to trackers; what they have is not sent again.

    Args:
        run: A run directory.
        trackers: wandb, mlflow, tensorboard, trackio, or one of a plug-in; by default those of the run.
        wandb_project: Project at Weights & Biases.
        wandb_entity: User or team at Weights & Biases.
        wandb_run_name: Name of the run at Weights & Biases.
        mlflow_tracking_uri: Address of an MLflow server, or a directory.
        mlflow_experiment_name: Experiment at MLflow.
        mlflow_run_name: Name of the run at MLflow.
        tensorboard_log_dir: Directory of the TensorBoard files.

    Returns:
        Tracker → how many lines of metrics.jsonl it has, all of them.

    Raises:
        SettingsError: no tracker is named, or one is unknown or not installed.
        RunDirectoryError: there is no such run, or it goes on at this moment.
        TrackingError: a tracker has not got the whole record.

    """
    path = Path(os.path.abspath(Path(run).expanduser()))
    if not (path / "config.yaml").is_file():
        raise RunDirectoryError(f"{run}: is no run directory (it holds no config.yaml).")
    values = run_values(path)
    given = {
        "trackers": None if trackers is None else tuple(trackers),
        "wandb_project": wandb_project,
        "wandb_entity": wandb_entity,
        "wandb_run_name": wandb_run_name,
        "mlflow_tracking_uri": mlflow_tracking_uri,
        "mlflow_experiment_name": mlflow_experiment_name,
        "mlflow_run_name": mlflow_run_name,
        "tensorboard_log_dir": tensorboard_log_dir,
    }
    if not any(given.values()):
        given = {field.name: values.get(field.name) for field in attrs.fields(TrackerSettings)}
    try:
        settings = TrackerSettings(**given)
    except (ValueError, TypeError) as error:
        raise SettingsError(f"{error}.") from error
    if not settings.chosen():
        raise SettingsError("trackers is empty, and the run has none: name one, such as tensorboard.")
    check_trackers(settings.chosen())
    lock = RunLock(path, busy="this run goes on at this moment, and sends its record itself", remedy="")
    warnings: list[str] = []
    with lock, Watchers(note=warnings.append, seconds=_SECONDS) as watchers:
        watchers.begin(path / "trackers", _identity(path), settings, values, None)
    failed = [line.removeprefix("WARNING: ") for line in warnings if line.startswith("WARNING")]
    if failed:
        raise TrackingError("\n".join(failed))
    return {name: read_sent(path, name).lines for name in settings.chosen()}


def _identity(path: Path) -> str:
    """Return the identity of a run."""
    try:
        found: Any = json.loads((path / "run.json").read_text(encoding="utf-8"))
        return str(found["run"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunDirectoryError(
            f"{path / 'run.json'}: cannot be read ({error!r}). A run directory has one; put it back."
        ) from error
