"""One recipe, everywhere: a laptop, torchrun, accelerate launch, a rendered sbatch file and a rendered TrainJob agree."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli._app import main

from .fake_clusters import Controller, commands, environment, free_port, sbatch
from .repository import ROOT
from .starts import untimed

pytestmark = [pytest.mark.slow, pytest.mark.lane]

RECIPE = {
    "verb": "sft",
    "model_path": "model",
    "data_path": "chats.jsonl",
    "ckpt_output_dir": "run",
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 128,
    "learning_rate": 1e-2,
    "weight_decay": 0.1,
    "max_steps": 3,
    "validation_split": 0.25,
    "eval_every_steps": 2,
    "connect_seconds": 120,
}
"""Paths are relative: each place has its own directory, volume or working directory."""
TOLERANCE = 1e-6
"""Relative: two ranks add the same numbers in the same order wherever they run."""
FORGE = [sys.executable, "-m", "forge"]
STARTED = {
    "laptop": [*FORGE, "sft", "recipe.yaml", "--nproc-per-node", "2"],
    "torchrun": [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node=2",
        "--master-port={port}",
        "-m",
        "forge",
        "sft",
        "recipe.yaml",
    ],
    "accelerate": [
        *(sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *(
            "--mixed_precision",
            "no",
            "--dynamo_backend",
            "no",
            "--main_process_port",
            "{port}",
            "-m",
            "forge",
            "sft",
            "recipe.yaml",
        ),
    ],
}


@pytest.fixture(scope="module")
def place(model_dir: Path, chats: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A function that makes a working directory with the recipe, the model and the rows."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        (folder / "recipe.yaml").write_text(yaml.safe_dump(RECIPE))
        (folder / "model").symlink_to(model_dir)
        (folder / "chats.jsonl").symlink_to(chats)
        return folder

    return make


def started(name: str, folder: Path) -> Path:
    """Run the recipe by a command of this machine."""
    words = [word.format(port=free_port()) for word in STARTED[name]]
    done = subprocess.run(words, cwd=folder, env=environment(folder), capture_output=True, text=True, check=False, timeout=480)
    assert done.returncode == 0, done.stderr
    return folder / "run"


def submitted(folder: Path) -> Path:
    """Run the recipe by the sbatch file that `forge slurm render` writes, on two nodes of one rank."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert main(["slurm", "render", "recipe.yaml", "--nodes", "2", "--output", "job.sh"]) == 0
    finally:
        os.chdir(before)
    process = sbatch(folder / "job.sh", commands(folder / "bin"), 2)
    _, err = process.communicate(timeout=480)
    assert process.returncode == 0, err
    return folder / "run"


def applied(folder: Path, model_dir: Path, chats: Path) -> Path:
    """Run the recipe by the TrainJob that `forge kubeflow render` writes, on two nodes of one rank."""
    words = ["kubeflow", "render", str(folder / "recipe.yaml"), "--nodes", "2", "--output", str(folder / "job.yaml")]
    assert main([*words, "--model-uri", "hf://org/model", "--dataset-uri", "hf://org/rows"]) == 0
    volume = folder / "workspace"
    (volume / "dataset").mkdir(parents=True)
    (volume / "model").symlink_to(model_dir)
    (volume / "dataset" / "chats.jsonl").symlink_to(chats)
    job = yaml.safe_load((folder / "job.yaml").read_text())
    runtimes = yaml.safe_load_all((ROOT / "deploy" / "kubeflow" / "runtimes.yaml").read_text())
    runtime = next(each for each in runtimes if each["metadata"]["name"] == job["spec"]["runtimeRef"]["name"])
    cluster = Controller(job, runtime, volume, commands(folder / "bin"))
    assert cluster.run(300) == "Complete", cluster.logs()
    return volume / "output" / "run"


def test_five_places_write_the_same_record(place: Any, model_dir: Path, chats: Path, record_property: Any) -> None:
    """Every line of metrics.jsonl has the same names, and every number agrees to 1e-6, with two ranks each."""
    names = [name for name in STARTED if name != "accelerate" or find_spec("accelerate")]
    runs = {name: started(name, place(name)) for name in names}
    runs["sbatch"] = submitted(place("sbatch"))
    runs["trainjob"] = applied(place("trainjob"), model_dir, chats)
    expected = untimed(runs["laptop"])
    assert [line["step"] for line in expected if "loss" in line] == [1, 2, 3]
    largest = 0.0
    for name, run in runs.items():
        assert "ranks: 2" in (run / "log.txt").read_text(), name
        found = untimed(run)
        assert [list(line) for line in found] == [list(line) for line in expected], name
        for line, other in zip(expected, found, strict=True):
            for key, value in line.items():
                assert other[key] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), (name, key)
                if isinstance(value, float) and value:
                    largest = max(largest, abs(other[key] - value) / abs(value))
    record_property("largest relative difference", largest)
    print(f"{len(runs)} places, largest relative difference {largest:.2g}")
