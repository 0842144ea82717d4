"""`accelerate launch -m forge sft`: each kind of launcher works, or is refused by name; its file is a source of settings."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge.cli._app import main
from forge.settings._accelerate import _ALWAYS, _READ, _REFUSED, _TAKEN, from_environment, translated

from ..lanes import ci_keeps
from .starts import metrics

pytest.importorskip("accelerate", reason="accelerate is not installed")
pytestmark = pytest.mark.slow

LAUNCH = (sys.executable, "-m", "accelerate.commands.launch")


@pytest.fixture
def words(model_dir: Path, chats: Path) -> list[str]:
    """A short run as flags."""
    given = {"model-path": model_dir, "data-path": chats, "max-steps": 2, "effective-batch-size": 4, "learning-rate": 1e-2}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def launched(*words: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run accelerate launch without a configuration of this machine."""
    environ = {**os.environ, "HF_HOME": str(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*LAUNCH, *words], env=environ, capture_output=True, text=True, timeout=480, check=False)


KINDS = {
    "fsdp": (["--use_fsdp", "--fsdp_version", "2", "--num_processes", "2"], 2, "strategy=fsdp2"),
    "multi_gpu": (["--multi_gpu", "--num_processes", "2"], 2, "2 ranks share the weights"),
    "deepspeed": (["--use_deepspeed", "--zero_stage", "1", "--num_processes", "2"], 2, "strategy=zero1"),
    "cpu": (["--cpu", "--num_processes", "1", "--mixed_precision", "bf16"], 1, "dtype: bfloat16"),
}


@pytest.mark.parametrize("kind", ci_keeps([], list(KINDS)))
def test_a_launcher_that_works(kind: str, words: list[str], tmp_path: Path, model_dir: Path, chats: Path) -> None:
    """The asked number of ranks train one model, as the launcher's options say: the losses are those of one process."""
    options, ranks, said = KINDS[kind]
    if kind == "deepspeed":
        pytest.importorskip("deepspeed")
    done = launched(*options, "-m", "forge", "sft", *words, "--ckpt-output-dir", str(tmp_path / "run"), tmp_path=tmp_path)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "log.txt").read_text()
    assert f"ranks: {ranks}, " in log
    assert said in log
    assert main(["sft", *words, "--ckpt-output-dir", str(tmp_path / "alone")]) == 0
    losses = [[line["loss"] for line in metrics(tmp_path / name)] for name in ("run", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=5e-3 if kind == "cpu" else 1e-6)


@pytest.mark.lane
def test_several_processes_of_which_one_is_started(words: list[str], tmp_path: Path) -> None:
    """`--cpu --num_processes 2` starts one process: it is refused before anything is written, unless told how many."""
    run = ["-m", "forge", "sft", *words, "--ckpt-output-dir", str(tmp_path / "run")]
    done = launched("--cpu", "--num_processes", "2", *run, tmp_path=tmp_path)
    assert done.returncode != 0
    assert "accelerate launch was asked for several processes" in done.stderr
    assert "exit status 2" in done.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.lane
def test_mpi_starts_workers(words: list[str], tmp_path: Path) -> None:
    """Two processes with the variables that mpirun and accelerate set train one model together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in ("0", "1"):
        mpi = {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
        environ = {
            **os.environ,
            **{f"OMPI_COMM_WORLD_{name}": value for name, value in mpi.items()},
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "ACCELERATE_USE_CPU": "True",
        }
        line = [sys.executable, "-m", "forge", "sft", *words, "--ckpt-output-dir", str(tmp_path / "run")]
        started.append(subprocess.Popen(line, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    ended = [process.communicate(timeout=480)[1] for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    assert "ranks: 2, " in (tmp_path / "run" / "log.txt").read_text()
    assert len(metrics(tmp_path / "run")) == 2


@pytest.mark.lane
def test_a_file_of_accelerate_starts_what_it_says(words: list[str], tmp_path: Path) -> None:
    """Two ranks under DDP, with the file as origin in config.yaml."""
    file = tmp_path / "accelerate.yaml"
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {"fsdp_sharding_strategy": "NO_SHARD", "fsdp_state_dict_type": "FULL_STATE_DICT"},
        "mixed_precision": "no",
        "num_machines": 1,
        "num_processes": 2,
        "use_cpu": True,
    }
    file.write_text(yaml.safe_dump(config))
    run = ["sft", *words, "--ckpt-output-dir", str(tmp_path / "run"), "--accelerate-config", str(file)]
    assert main(run) == 0
    written = (tmp_path / "run" / "config.yaml").read_text()
    for setting in ("nproc_per_node: 2", "strategy: ddp", "device: cpu", "dtype: float32"):
        assert f"{setting}  # accelerate {file}" in written
    assert "ranks: 2, " in (tmp_path / "run" / "log.txt").read_text()


PASSED_ON = {
    "nothing": ([], {}),
    "cpu": (["--cpu", "--mixed_precision", "bf16"], {"device": "cpu", "dtype": "bfloat16"}),
    "fsdp": (["--use_fsdp", "--fsdp_offload_params", "true"], {"strategy": "fsdp2", "cpu_offload": True}),
    "deepspeed": (
        ["--use_deepspeed", "--zero_stage", "3", "--gradient_clipping", "0.5"],
        {"strategy": "zero3", "max_grad_norm": 0.5},
    ),
}


@pytest.mark.parametrize("kind", ci_keeps(["fsdp"], list(PASSED_ON)))
def test_what_the_launcher_passes_on_is_known(kind: str, tmp_path: Path) -> None:
    """The variables that this version of accelerate sets, its defaults included, are all read or always so."""
    options, settings = PASSED_ON[kind]
    if "--use_deepspeed" in options:
        pytest.importorskip("deepspeed")
    script = tmp_path / "show.py"
    script.write_text("import json, os; print('ENV' + json.dumps(dict(os.environ)))\n")
    done = launched(*options, "--num_processes", "1", str(script), tmp_path=tmp_path)
    line = next(line for line in done.stdout.splitlines() if line.startswith("ENV"))
    assert translated(from_environment(yaml.safe_load(line[3:])), "accelerate launch") == settings


def test_every_key_of_the_file_is_known() -> None:
    """Each field of accelerate's own configuration class is read, always so, or refused by name."""
    from accelerate.commands.config.config_args import ClusterConfig

    fields = {field.name for field in dataclasses.fields(ClusterConfig)}
    known = {*_READ, *_ALWAYS, *_REFUSED, *_TAKEN, "distributed_type", "fsdp_config", "deepspeed_config", "parallelism_config"}
    assert fields - known == set()
