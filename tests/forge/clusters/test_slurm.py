"""sbatch files: their options, and a shell that reads back the command; tests/whole runs them."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge._errors import SettingsError
from forge.cli._app import main
from forge.clusters import sbatch

GIVEN = {"model_path": "org/model", "data_path": "train.jsonl", "ckpt_output_dir": "first"}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe in a directory whose name a shell would take apart, which is the current one."""
    folder = tmp_path / "it's a $HOME; dir"
    folder.mkdir()
    monkeypatch.chdir(folder)
    file = folder / "my recipe.yaml"
    file.write_text(yaml.safe_dump(GIVEN))
    return file


def options(text: str) -> list[str]:
    """The options of an sbatch file."""
    return [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]


def test_it_asks_for_what_was_asked(recipe: Path) -> None:
    """Nodes, accelerators, time; a task a node; requeued, its log appended to."""
    text = sbatch(recipe, nodes=4, gpus=8, time="1-12:00:00", partition="gpu", account="us", name="run7", grace=600)
    assert options(text) == [
        *("job-name=run7", "nodes=4", "ntasks-per-node=1", "gpus-per-node=8"),
        *("time=1-12:00:00", "partition=gpu", "account=us"),
        *("requeue", "open-mode=append", "output=%x-%j.log", "signal=B:USR1@600"),
    ]
    assert "gpus" not in " ".join(options(sbatch(recipe)))


@pytest.mark.parametrize("render", ["slurm", "kubeflow"])
def test_what_the_nodes_would_refuse_does_not_wait_in_a_queue(
    render: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """More ranks than a step has samples, and more processes than a node may have."""
    words = [render, "render", str(recipe), *(["--dataset-uri", "hf://org/rows"] if render == "kubeflow" else [])]
    for asked, message in (
        (("--nodes", "5", "--gpus", "8"), "effective_batch_size=32 is less than the 40 ranks of 5 nodes"),
        (("--gpus", "2000"), "must be at most 1024 processes on a node; got 2000"),
    ):
        assert main([*words, *asked]) == 2
        assert message in capsys.readouterr().err
    assert main([*words, "--nodes", "4", "--gpus", "8"]) == 0
    recipe.write_text(yaml.safe_dump({**GIVEN, "backend": "mini-trainer"}))
    assert main([*words, "--nodes", "2", "--gpus", "8"]) == 2
    assert "is not available with backend=mini-trainer: it starts the processes of one node" in capsys.readouterr().err
    assert main([*words, "--gpus", "8"]) == 0
    recipe.write_text(yaml.safe_dump({**GIVEN, "strategy": "fsdp2", "tp_size": 4, "effective_batch_size": 10}))
    assert main([*words, "--nodes", "5", "--gpus", "8"]) == 0, "ranks that share rows count as one"


def test_a_shell_reads_the_command_back(recipe: Path) -> None:
    """Whatever the directory and the recipe are called."""
    text = sbatch("my recipe.yaml", nodes=2, nproc_per_node=3)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    (line,) = [line for line in text.splitlines() if line.startswith("srun")]
    assert shlex.split(line)[3:-1] == ["forge", "sft", str(recipe), "--nproc-per-node=3"]
    (line,) = [line for line in text.splitlines() if line.startswith("cd ")]
    assert shlex.split(line)[2] == os.getcwd() == str(recipe.parent)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"nodes": 0}, "nodes must be"),
        ({"gpus": 1.5}, "gpus must be"),
        ({"grace": 0}, "grace must be"),
        ({"grace": 10**6}, "grace must be at most"),
        ({"name": "a\n#SBATCH --x"}, "name must be one word"),
        ({"name": "../a"}, "name must have no /"),
        ({"time": "\u0661:\u0660\u0660"}, "time must be"),
        ({"partition": "a b"}, "partition must be one word"),
        ({"account": ""}, "account must be one word"),
        ({"time": "soon"}, "time must be"),
        ({"nproc_per_node": 0}, "nproc_per_node must be"),
        ({"verb": "lora"}, "no verb 'lora'"),
        ({"verb": "dpo", "gpus": 1, "nproc_per_node": 2}, "more than the 1 accelerator of"),
    ],
)
def test_what_slurm_would_not_take_is_refused(recipe: Path, given: dict[str, Any], named: str) -> None:
    """By name, before anything is written."""
    with pytest.raises(SettingsError, match=named):
        sbatch(recipe, **given, output="job.sh")
    assert not Path("job.sh").exists()


def test_a_recipe_that_is_wrong_is_refused(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before it waits in a queue for hours."""
    recipe.write_text(yaml.safe_dump({**GIVEN, "lr": 1}))
    assert main(["slurm", "render", str(recipe)]) == 2
    assert "learning_rate" in capsys.readouterr().err
    recipe.write_text(yaml.safe_dump({**GIVEN, "master_addr": "h"}))
    with pytest.raises(SettingsError, match="master_addr='h' is what the cluster says"):
        sbatch(recipe)
    assert main(["slurm", "render", "none.yaml"]) == 2


def test_the_command_writes_a_new_file(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints, or writes a file that was not there."""
    words = ["slurm", "render", str(recipe), "--nodes", "2"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert main([*words, "--output", "job.sh"]) == 0
    assert Path("job.sh").read_text().rstrip("\n") == printed.rstrip("\n")
    assert main([*words, "--output", "job.sh"]) == 2


def test_a_recipe_that_leaves_open_what_a_run_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A shipped recipe as it was copied: the remedy is a line in the file, which works; other faults come first."""
    file = tmp_path / "mine.yaml"
    assert main(["recipes", "cp", "sft-lora", str(file)]) == 0
    words = ["slurm", "render", str(file)]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert f"{file} leaves model_path, data_path, ckpt_output_dir open" in said
    assert "`model_path: org/model`" in said
    assert main([*words, "--model-path", "org/model"]) == 2
    assert "are lines of the recipe" in capsys.readouterr().err
    assert main([*words, "--nothing"]) == 2
    assert "recipe" not in capsys.readouterr().err
    file.write_text(file.read_text() + "model_path: org/model\nckpt_output_dir: /shared/runs/first\n")
    assert main(words) == 2
    assert "`data_path: /shared/train.jsonl`" in capsys.readouterr().err
    whole = file.read_text() + "data_path: /shared/train.jsonl\n"
    file.write_text(whole)
    assert main(words) == 0
    file.write_text(file.read_text().replace("lora_r: 16", "lora_r: -1").replace("data_path", "# data_path"))
    assert main(words) == 2
    assert "lora_r" in capsys.readouterr().err
