"""Trackers: each line once, whatever a tracker does, and the run never waits longer than it was told to."""

from __future__ import annotations

import copy
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import forge_accel
from forge._errors import SettingsError
from forge.settings._trackers import TrackerSettings
from forge.trackers import _watchers
from forge.trackers._callbacks import Callbacks
from forge.trackers._table import check_trackers
from forge.trackers._watchers import Watchers

from .toys import got, install


@pytest.fixture(scope="module", autouse=True)
def toys(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Entry points of the toys."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(install(tmp_path_factory.mktemp("toys") / "site"))
        yield


def write(run: Path, *lines: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def step(number: int, **more: Any) -> dict[str, Any]:
    return {"time": "now", "step": number, "epoch": 0, "loss": 1 / number, "lr": 0.1, **more}


def watch(run: Path, *names: str, lines: tuple[dict[str, Any], ...] = (), seconds: float = 240) -> list[str]:
    """Write lines while trackers watch; what the run says."""
    said: list[str] = []
    with Watchers(note=said.append, seconds=seconds) as watchers:
        values = {"model_path": "/home/me/model", "seed": 1, "warmup_steps": None, "target_modules": ["q", "k"]}
        watchers.begin(run / "trackers", "an-id", TrackerSettings(trackers=names), values, None)
        write(run, *lines)
    return [line for line in said if line.startswith("WARNING")]


@pytest.mark.slow
def test_a_tracker_gets_each_line_once(tmp_path: Path) -> None:
    """Numbers flattened, settings once and without paths; a resumed run that makes steps again sends none of them twice."""
    first = [{"step": 0, "eval_loss": 2.0}, step(1, memory=None, expert_load={"a": [1, 2]}), step(2, skipped=True)]
    assert watch(tmp_path, "toy_good", lines=tuple(first)) == []
    (start, settings, *lines, finish) = got(tmp_path, "toy_good")
    assert (start, finish) == (["start", "an-id"], ["finish"])
    assert settings == ["settings", {"model_path": "model", "seed": 1, "target_modules": "['q', 'k']"}]
    assert lines == [
        [0, {"eval_loss": 2.0}],
        [1, {"epoch": 0, "loss": 1.0, "lr": 0.1, "expert_load/a/0": 1, "expert_load/a/1": 2}],
        [2, {"epoch": 0, "loss": 0.5, "lr": 0.1, "skipped": 1}],
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in first[:2]))
    again = (step(2, tokens_per_second=9), {"step": 2, "eval_loss": 1.0}, step(3))
    assert watch(tmp_path, "toy_good", lines=again) == []
    assert [line[0] for line in got(tmp_path, "toy_good")[5 + 1 :]] == ["start", 2, 3, "finish"]
    assert got(tmp_path, "toy_good")[7] == [2, {"eval_loss": 1.0}]


@pytest.mark.slow
def test_no_tracker_holds_up_another_or_the_run(tmp_path: Path) -> None:
    """One raises, one hangs, one dies: the run says of each what it has not got, and the fourth has all of it."""
    began = time.monotonic()
    lines = tuple(step(number) for number in (1, 2, 3))
    warnings = watch(tmp_path, "toy_raising", "toy_hanging", "toy_dying", "toy_good", lines=lines, seconds=6)
    assert time.monotonic() - began < 60
    assert [line[0] for line in got(tmp_path, "toy_good")] == ["start", "settings", 1, 2, 3, "finish"]
    assert [line.split(": ")[1] for line in warnings] == ["toy_raising", "toy_hanging", "toy_dying"]
    assert all("2 lines were not sent" in line and "forge track" in line for line in warnings)
    assert "the network is away" in warnings[0]
    assert "did not answer" in warnings[1]
    (tmp_path / "trackers" / "back").touch()
    assert watch(tmp_path, "toy_raising") == []
    steps = [line[0] for line in got(tmp_path, "toy_raising") if isinstance(line[0], int)]
    assert steps == [1, 2, 3], "what it missed is sent when it is back, and nothing twice"


def test_a_first_failure_is_said_while_the_run_goes_on(tmp_path: Path) -> None:
    """Once, with its reason and what helps; not for what an earlier start failed with."""
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "toy_raising.json").write_text(json.dumps({"error": "of an earlier start"}))
    said: list[str] = []
    with Watchers(note=said.append, seconds=1) as watchers:
        watchers.begin(tmp_path / "trackers", "an-id", TrackerSettings(trackers=("toy_raising",)), {}, None)
        watchers.record(step(1))
        assert len(said) == 1, "that it was started"
        write(tmp_path, step(1), step(2))
        until = time.monotonic() + 60
        while len(said) < 2 and time.monotonic() < until:
            time.sleep(0.05)
            watchers.record(step(2))
        watchers.record(step(3))
        (warned,) = said[1:]
        assert warned.startswith(
            "WARNING: toy_raising has not got what the run recorded (ConnectionError: the network is away)"
        )
        assert f"`forge track {tmp_path}`" in warned


@pytest.mark.parametrize(
    ("name", "said"), [("tensorbord", "Did you mean 'tensorboard'"), ("nothing", "known are kubeflow, mlflow")]
)
def test_an_unknown_tracker_is_refused(name: str, said: str) -> None:
    """By name, with the nearest one."""
    with pytest.raises(SettingsError, match=said):
        check_trackers([name])


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is done, with the command that installs it."""
    monkeypatch.setattr("forge.trackers._table.find_spec", lambda _: None)
    with pytest.raises(SettingsError, match=r"pip install 'forge-llm\[wandb\]'"):
        check_trackers(["wandb"])


def test_a_setting_switches_its_tracker_on() -> None:
    """As training_hub's do; beside other trackers it is refused."""
    assert TrackerSettings(wandb_project="a", tensorboard_log_dir="b").chosen() == ("wandb", "tensorboard")
    assert TrackerSettings(trackers=("mlflow", "mlflow")).chosen() == ("mlflow",)
    assert TrackerSettings().chosen() == ()
    with pytest.raises(ValueError, match="wandb_project has no effect without the tracker wandb"):
        TrackerSettings(trackers=("mlflow",), wandb_project="a")


@pytest.mark.parametrize("address", ["https://me:SECRET@host/path", "https://host/?token=SECRET"])
def test_no_password_in_the_settings(address: str) -> None:
    """It would stand in config.yaml."""
    with pytest.raises(ValueError, match="MLFLOW_TRACKING_PASSWORD") as caught:
        TrackerSettings(mlflow_tracking_uri=address)
    assert "SECRET" not in str(caught.value)


class Greedy:
    """A callback that changes whatever it can reach, and takes its time."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.seen.append(copy.deepcopy(record))
        record["loads"].append(9)
        record.clear()
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global state is what it must not change
        torch.manual_seed(1)
        time.sleep(0.2)

    def on_end(self, result: dict[str, int]) -> None:
        result["steps"] = 0


def test_a_callback_changes_nothing_and_a_slow_one_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Record, result and random states are as they were; that the run stood still is a warning, once."""
    monkeypatch.setattr(_watchers, "_SLOW_SECONDS", 0.1)
    said: list[str] = []
    first, second, line = Greedy(), Greedy(), {"step": 7, "lr": 0.1, "loads": [1]}
    with Watchers(Callbacks([first, second]), said.append) as watchers:
        watchers.begin(tmp_path / "trackers", "an-id", TrackerSettings(), {}, forge_accel.accelerator())
        states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        for _ in range(2):
            watchers.record(line)
        assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states  # noqa: NPY002
        assert watchers.end({"steps": 7}) == {"steps": 7}
    assert first.seen == second.seen == [line, line] == 2 * [{"step": 7, "lr": 0.1, "loads": [1]}]
    assert len(said) == 1
    assert re.match(r"WARNING: callbacks took \d+ s after step 7, and the run stood still meanwhile", said[0])
