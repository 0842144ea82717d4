"""A run → its tracker at W&B, MLflow, TensorBoard or trackio, by accelerate's classes.

Each goes on with the same run after a restart, by the run's own id; each works without a network: W&B with WANDB_MODE=offline,
MLflow and TensorBoard with a directory, which is in the run directory unless another one is given.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from forge.trackers._tracker import TrackedRun

if TYPE_CHECKING:
    from accelerate.tracking import MLflowTracker, TensorBoardTracker, TrackioTracker, WandBTracker

_PROJECT = "forge"
_TAG = "forge_run"
"""Tag by which an MLflow run is found again."""


def wandb(run: TrackedRun) -> WandBTracker:
    """Make a tracker at Weights & Biases."""
    from accelerate.tracking import WandBTracker

    _begin(run)
    return WandBTracker(
        run.settings.get("wandb_project") or os.environ.get("WANDB_PROJECT") or _PROJECT,
        entity=run.settings.get("wandb_entity"),
        name=run.settings.get("wandb_run_name") or run.name,
        id=run.id,
        resume="allow",
        dir=str(run.files),
    )


def mlflow(run: TrackedRun) -> MLflowTracker:
    """Make a tracker at an MLflow server, or in a directory."""
    from accelerate.tracking import MLflowTracker
    from mlflow import MlflowClient

    class FoundAgain(MLflowTracker):
        """Tracker that goes on with the run of an earlier start."""

        def start(self) -> None:  # type: ignore[override]  # accelerate wraps its own
            client = MlflowClient()
            experiment = client.get_experiment_by_name(self.experiment_name or _PROJECT)
            found: list[Any] = []
            if experiment is not None:
                found = client.search_runs([experiment.experiment_id], f"tags.`{_TAG}` = '{run.id}'", max_results=1)
            self.run_id = found[0].info.run_id if found else None
            super().start()

    _begin(run)
    os.environ["MLFLOW_TRACKING_URI"] = (
        run.settings.get("mlflow_tracking_uri") or os.environ.get("MLFLOW_TRACKING_URI") or str(run.files / "mlflow")
    )
    # MLflow keeps its oldest store, a plain directory, behind this switch; it alone needs no database and no server.
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    if experiment := run.settings.get("mlflow_experiment_name"):
        os.environ["MLFLOW_EXPERIMENT_NAME"] = experiment
    return FoundAgain(_PROJECT, run_name=run.settings.get("mlflow_run_name") or run.name, tags={_TAG: run.id})


def tensorboard(run: TrackedRun) -> TensorBoardTracker:
    """Make a tracker that writes TensorBoard's files."""
    from accelerate.tracking import TensorBoardTracker

    _begin(run)
    folder = run.settings.get("tensorboard_log_dir")
    return TensorBoardTracker(run.name, folder or str(run.files / "tensorboard"))


def trackio(run: TrackedRun) -> TrackioTracker:
    """Make a tracker at trackio, which keeps its files in its own folder of the user."""
    from accelerate.tracking import TrackioTracker

    file = run.files / "trackio_settings.json"

    class Described(TrackioTracker):
        """Tracker whose run keeps its settings; trackio replaces them by those of the last start."""

        def start(self) -> None:  # type: ignore[override]  # accelerate wraps its own
            super().start()
            if file.exists():
                super().store_init_configuration(json.loads(file.read_text(encoding="utf-8")))

        def store_init_configuration(self, values: dict[str, Any]) -> None:  # type: ignore[override]  # see above
            file.write_text(json.dumps(values, default=str), encoding="utf-8")
            super().store_init_configuration(values)

    _begin(run)
    return Described(_PROJECT, name=f"{run.name}-{run.id}", resume="allow")


def _begin(run: TrackedRun) -> None:
    run.files.mkdir(exist_ok=True)
    from accelerate import PartialState

    # Accelerate's trackers log, and its logs want a state; this process is no rank of anything.
    PartialState(cpu=True)
