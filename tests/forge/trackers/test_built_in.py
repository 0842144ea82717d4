"""The built-in trackers, each without a network: what their own files say is what metrics.jsonl says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

# A process of its own: accelerate, W&B and MLflow leave a state behind in theirs.
CODE = """
import json, sys, threading
from pathlib import Path
from forge.trackers._tracker import TrackedRun
from forge.trackers._worker import send
run = TrackedRun(directory=Path(sys.argv[1]), id="a1b2c3", settings={"mlflow_experiment_name": "fruits"})
ended = threading.Event()
ended.set()
for steps in ((1, 2), (3,)):
    with (run.directory / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": "now", "step": step, "loss": 2.0 / step, "lr": 0.5}) + "\\n" for step in steps)
    for name in sys.argv[2:]:
        assert send(name, run, {"seed": 1, "model_path": "tiny"}, ended)
"""
NAMES = [name for name in ("tensorboard", "wandb", "mlflow", "trackio") if find_spec(name) and find_spec("accelerate")]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose record was sent in two parts, as a run that is resumed sends it."""
    run = tmp_path_factory.mktemp("runs") / "first"
    run.mkdir()
    environ = {**os.environ, "WANDB_MODE": "offline", "MLFLOW_ALLOW_FILE_STORE": "true", "CUDA_VISIBLE_DEVICES": ""}
    environ["TRACKIO_DIR"] = str(run.parent / "trackio")
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(run), *NAMES], env=environ, capture_output=True, text=True, check=False, timeout=500
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return run


def needs(name: str) -> None:
    if name not in NAMES:
        pytest.skip(f"{name} or accelerate is not installed (the extra `{name}` of forge-llm)")


@pytest.mark.lane
@pytest.mark.slow
def test_tensorboard(run: Path) -> None:
    """The event files hold each step once, and the settings."""
    needs("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run / "trackers" / "tensorboard" / "first")).Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3))]
    settings = [file.read_text() for file in (run / "trackers" / "tensorboard").rglob("hparams.yml")]
    assert settings == ["model_path: tiny\nseed: 1\n"]


@pytest.mark.lane
@pytest.mark.slow
def test_wandb(run: Path) -> None:
    """Both parts are kept offline under one id, for `wandb sync` to send."""
    needs("wandb")
    files = sorted((run / "trackers" / "wandb").glob("offline-run-*-a1b2c3/run-a1b2c3.wandb"))
    assert len(files) == 2
    assert b"lr" in files[0].read_bytes()


@pytest.mark.lane
@pytest.mark.slow
def test_mlflow(run: Path) -> None:
    """The second part goes on with the run of the first, found by its tag."""
    needs("mlflow")
    (loss,) = (run / "trackers" / "mlflow").rglob("metrics/loss")
    assert [line.split()[1:] for line in loss.read_text().splitlines()] == [["2.0", "1"], ["1.0", "2"], [str(2 / 3), "3"]]
    home = loss.parents[1]
    assert (home / "params" / "seed").read_text() == "1"
    assert (home / "tags" / "forge_run").read_text() == "a1b2c3"
    assert "name: fruits" in (home.parent / "meta.yaml").read_text()


@pytest.mark.lane
@pytest.mark.slow
def test_trackio(run: Path) -> None:
    """Its own command reads each step once, and the settings, which the second part does not lose."""
    needs("trackio")

    def asked(*words: str) -> dict[str, Any]:
        words = ("get", *words, "--project", "forge", "--run", "first-a1b2c3", "--json")
        environ = {**os.environ, "TRACKIO_DIR": str(run.parent / "trackio")}
        done = subprocess.run(
            [sys.executable, "-m", "trackio.cli", *words], env=environ, capture_output=True, text=True, check=True, timeout=500
        )
        return json.loads(done.stdout)

    loss = asked("metric", "--metric", "loss")["values"]
    assert [(each["step"], each["value"]) for each in loss] == [(1, 2.0), (2, 1.0), (3, pytest.approx(2 / 3))]
    about = asked("run")
    assert sorted(about["metrics"]) == ["loss", "lr"]
    assert {"seed": 1, "model_path": "tiny"}.items() <= about["config"].items()
