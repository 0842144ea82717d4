"""Rendered files run: an sbatch file under a made-up srun, a TrainJob under a made-up controller, each with two nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from forge.cli._app import main

from .fake_clusters import Controller, commands, sbatch
from .repository import ROOT
from .starts import RUN, metrics, sft

pytestmark = pytest.mark.slow

STEPS = 12
SETTINGS: dict[str, Any] = {**RUN, "num_epochs": 3, "logging_steps": 1, "connect_seconds": 60}


@pytest.fixture(scope="module")
def expected(model_dir: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of one process that nothing stops."""
    run = tmp_path_factory.mktemp("alone") / "run"
    sft({**SETTINGS, "model_path": str(model_dir), "data_path": str(chats), "ckpt_output_dir": str(run)})
    return losses(run)


def losses(run: Path) -> list[float]:
    """The loss of each step; a step that was made again counts once."""
    found = {line["step"]: line["loss"] for line in metrics(run) if "loss" in line}
    assert list(found) == list(range(1, len(found) + 1))
    return list(found.values())


@pytest.fixture
def volume(model_dir: Path, chats: Path, tmp_path: Path) -> Path:
    """The volume of a TrainJob as its initializers leave it."""
    (tmp_path / "workspace" / "dataset").mkdir(parents=True)
    (tmp_path / "workspace" / "model").symlink_to(model_dir)
    (tmp_path / "workspace" / "dataset" / "chats.jsonl").symlink_to(chats)
    return tmp_path / "workspace"


def controller(volume: Path, settings: dict[str, Any]) -> Controller:
    """The controller of a TrainJob that `forge kubeflow render` wrote for a recipe."""
    recipe, job = volume.parent / "recipe.yaml", volume.parent / "job.yaml"
    recipe.write_text(yaml.safe_dump(settings))
    words = [
        "kubeflow",
        "render",
        str(recipe),
        "--nodes",
        "2",
        "--model-uri",
        "hf://org/model",
        "--dataset-uri",
        "hf://org/rows",
    ]
    assert main([*words, "--output", str(job)]) == 0
    made = yaml.safe_load(job.read_text())
    runtimes = yaml.safe_load_all((ROOT / "deploy" / "kubeflow" / "runtimes.yaml").read_text())
    runtime = next(each for each in runtimes if each["metadata"]["name"] == made["spec"]["runtimeRef"]["name"])
    return Controller(made, runtime, volume, commands(volume.parent / "bin"))


def test_a_trainjob_trains_what_one_process_does(volume: Path, expected: list[float]) -> None:
    """The rendered command on two nodes, with nothing but PET_* to say where they are."""
    cluster = controller(volume, {**SETTINGS, "max_steps": 3, "data_path": "chats.jsonl", "ckpt_output_dir": "first"})
    cluster.preflight = False
    assert cluster.run(240) == "Complete", cluster.logs()
    run = volume / "output" / "first"
    assert "environment: PET_NPROC_PER_NODE" in (run / "config.yaml").read_text()
    assert len(list((run / "logs").iterdir())) == 2
    assert losses(run)[0] == pytest.approx(expected[0], rel=1e-5)
    assert len(losses(run)) == 3


@pytest.mark.lane
def test_a_trainjob_outlives_a_node(volume: Path, expected: list[float]) -> None:
    """Preflight on two nodes, training; one node is lost and replaced; the losses are those of a run that nothing stopped."""
    cluster = controller(volume, {**SETTINGS, "data_path": "chats.jsonl", "ckpt_output_dir": "first"})
    run, killed = volume / "output" / "first", []

    def lose_a_node() -> None:
        if not killed and (run / "full_state" / "latest").exists():
            node = next(pod for pod in cluster.pods if pod.index == 1)
            assert node.container == "node"
            node.kill()
            killed.append(node)

    assert cluster.run(240, lose_a_node) == "Complete", cluster.logs()
    assert killed
    statuses: dict[str, set[int]] = {"preflight": set(), "node": set()}
    for _, container, status in cluster.history:
        statuses[container].add(status)
    # The other node ends with its error. The replaced one checks while that still runs, fails with 1, and is tried again.
    assert statuses["node"] == {-signal.SIGKILL, 1, 0}
    assert statuses["preflight"] <= {0, 1}
    assert "cluster: 2 nodes" in cluster.logs()
    assert "environment: PET_NPROC_PER_NODE" in (run / "config.yaml").read_text()
    np.testing.assert_allclose(losses(run), expected, rtol=1e-5)


@pytest.mark.lane
def test_bad_input_fails_the_job_before_a_node_trains(volume: Path) -> None:
    """Preflight ends with 2 on the first node, which by the runtime's rules no retry follows; nothing is left in the output."""
    (volume / "dataset" / "broken.jsonl").write_text('{"messages": 3}\n')
    cluster = controller(volume, {**SETTINGS, "data_path": "broken.jsonl", "ckpt_output_dir": "first"})
    assert cluster.run(120) == "Failed"
    assert (0, "preflight", 2) in cluster.history
    assert not [container for _, container, _ in cluster.history if container == "node"]
    assert "broken.jsonl:1" in cluster.logs()
    assert not (volume / "output" / "first").exists()


@pytest.mark.lane
def test_an_sbatch_file_requeues_itself(
    model_dir: Path, chats: Path, tmp_path: Path, expected: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the time limit the ranks save their state, and the job is requeued and goes on; scancel requeues nothing."""
    monkeypatch.chdir(tmp_path)
    settings = {**SETTINGS, "model_path": str(model_dir), "data_path": str(chats), "ckpt_output_dir": "run"}
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    assert main(["slurm", "render", "recipe.yaml", "--nodes", "2", "--output", "job.sh"]) == 0
    folder = commands(tmp_path / "bin")
    run, asked = tmp_path / "run", folder / "asked"

    for state in ("CANCELLED", "RUNNING"):
        process = sbatch(Path("job.sh"), folder, 2, FAKE_STATE=state)
        before = len(metrics(run)) if (run / "metrics.jsonl").exists() else 0
        until(process, lambda before=before: (run / "full_state" / "latest").exists() and len(metrics(run)) > before)
        # What Slurm sends to the batch script alone, so many seconds before the time limit.
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=480)
        assert process.returncode == 75, err
        job = asked.read_text().split()[-1]
        assert (f"requeue {job}" in asked.read_text()) == (state == "RUNNING")
        assert ("requeued: status 75" in out) == (state == "RUNNING")
    process = sbatch(Path("job.sh"), folder, 2)
    out, err = process.communicate(timeout=480)
    assert process.returncode == 0, err
    # Each node says where the model is.
    assert set(out.split()) == {str(run / "hf_format" / "samples_72")}
    np.testing.assert_allclose(losses(run), expected, rtol=1e-5)


def until(process: subprocess.Popen[str], condition: Any, seconds: float = 300) -> None:
    """Wait for something to become true while a process runs."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_signal_to_the_script_alone_ends_nothing(tmp_path: Path) -> None:
    """A preemption's SIGTERM reaches the tasks by itself; the script waits for them, and takes their status."""
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model_path": "m", "data_path": "d", "ckpt_output_dir": "c"}))
    assert main(["slurm", "render", str(tmp_path / "recipe.yaml"), "--nodes", "2", "--output", str(tmp_path / "job.sh")]) == 0
    folder = commands(tmp_path / "bin")
    ready = folder / "ready"
    (folder / "forge").write_text(
        f"#!/bin/bash\ntrap 'exit 75' TERM\ntouch {ready}$SLURM_NODEID\nfor i in $(seq 100); do sleep 0.1; done\nexit 9\n"
    )
    process = sbatch(tmp_path / "job.sh", folder, 2)
    until(process, lambda: Path(f"{ready}0").exists() and Path(f"{ready}1").exists())
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGUSR1)
    out, err = process.communicate(timeout=480)
    assert (process.returncode, "requeued: status 75" in out) == (75, True), err
    assert os.environ.get("SLURM_JOB_ID") is None
