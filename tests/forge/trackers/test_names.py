"""Names and places of a run at the built-in trackers, as they are handed to accelerate's classes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("accelerate", reason="an extra of forge-llm brings it")

from forge.trackers import _built_in
from forge.trackers._tracker import TrackedRun


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tracker's name and settings → accelerate's tracker, not started."""
    monkeypatch.setattr(_built_in, "_begin", lambda _: None)
    for name in ("WANDB_PROJECT", "MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.setenv(name, "")  # so that what a tracker sets is put back

    def make(name: str, **settings: str) -> Any:
        return getattr(_built_in, name)(TrackedRun(directory=Path("/runs/first"), id="a1", settings=settings))

    return make


def test_wandb(made: Any) -> None:
    """Project, entity and name as given; the id goes on with the same run."""
    plain = made("wandb")
    assert (plain.run_name, plain.init_kwargs["name"], plain.init_kwargs["id"]) == ("forge", "first", "a1")
    given = made("wandb", wandb_project="p", wandb_entity="e", wandb_run_name="n")
    assert (given.run_name, given.init_kwargs["entity"], given.init_kwargs["name"]) == ("p", "e", "n")


def test_mlflow(made: Any) -> None:
    """A directory in the run unless an address is given."""
    assert made("mlflow").run_name == "first"
    assert os.environ["MLFLOW_TRACKING_URI"] == "/runs/first/trackers/mlflow"
    given = made("mlflow", mlflow_tracking_uri="http://host:5000", mlflow_experiment_name="e", mlflow_run_name="n")
    assert (given.experiment_name, given.run_name) == ("e", "n")
    assert os.environ["MLFLOW_TRACKING_URI"] == "http://host:5000"


def test_tensorboard_and_trackio(made: Any) -> None:
    """A folder named as the run; trackio has one namespace for all projects, so its names hold the id."""
    assert made("tensorboard").logging_dir_param == "/runs/first/trackers/tensorboard"
    assert made("tensorboard", tensorboard_log_dir="/boards").logging_dir_param == "/boards"
    assert made("trackio").init_kwargs["name"] == "first-a1"
