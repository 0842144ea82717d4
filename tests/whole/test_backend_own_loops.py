"""The backends `mini-trainer` and `instructlab-training`: their own run_training on forge's rows, on a CPU for once."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.backends._instructlab import InstructLabBackend
from forge.backends._mini_trainer import MiniTrainerBackend

from .starts import metrics
from .verbs import settings_of

# What the libraries and their dependencies warn about; none of it is about the rows.
pytestmark = pytest.mark.filterwarnings("ignore")

BACKENDS: dict[str, type] = {"mini-trainer": MiniTrainerBackend, "instructlab-training": InstructLabBackend}
MODULES = {"mini-trainer": "mini_trainer.api_train", "instructlab-training": "instructlab.training.config"}


@pytest.fixture
def untied(model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model with a head of its own: mini-trainer cannot save a tied one from a CPU."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir)
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.save_pretrained(tmp_path / "untied")
    AutoTokenizer.from_pretrained(model_dir).save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


@pytest.fixture
def on_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the device switched off, and a torchrun that runs one process on the CPU."""
    for kind in BACKENDS.values():
        monkeypatch.setattr(kind, "_check_device", lambda *_: None)
    torchrun = tmp_path / "bin" / "torchrun"
    torchrun.parent.mkdir()
    script = Path(__file__).with_name("cpu_torchrun.py")
    torchrun.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    torchrun.chmod(0o755)
    monkeypatch.setenv("PATH", str(torchrun.parent), prepend=":")


def given(verb: str, model: Path, folder: Path, backend: str, **more: Any) -> dict[str, Any]:
    """Settings of a short run."""
    pytest.importorskip(MODULES[backend], reason=f"{backend} is not installed here")
    found = settings_of(verb, model, folder)
    del found["validation_split"]
    return {**found, "backend": backend, "ckpt_output_dir": folder / "run", **more}


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_mini_trainer_trains_on_the_rows_of_forge(untied: Path, tmp_path: Path) -> None:
    """Its own loop makes the steps; the first loss is that of its first rows; config, record and model are a run of forge's."""
    settings = given("sft", untied, tmp_path, "mini-trainer", effective_batch_size=24, max_tokens_per_gpu=2048, max_steps=2)
    result = forge.sft(**settings)
    ours = forge.sft(**{**settings, "backend": "forge", "ckpt_output_dir": tmp_path / "forge"})
    # With all rows in a step the order does not matter.
    theirs, own = metrics(tmp_path / "run"), metrics(tmp_path / "forge")
    assert [line["step"] for line in theirs] == [1, 2]
    # It computes in bfloat16.
    assert theirs[0]["loss"] == pytest.approx(own[0]["loss"], rel=1e-3)
    for name in ("samples", "tokens", "loss_tokens", "lr"):
        assert [line[name] for line in theirs] == pytest.approx([line[name] for line in own]), name
    assert (result.steps, result.samples) == (ours.steps, ours.samples)
    assert result.model_dir.name == "samples_48"
    assert "backend: mini-trainer" in (tmp_path / "run" / "config.yaml").read_text()
    assert "Not promised with it" in (tmp_path / "run" / "log.txt").read_text()
    assert forge.generate(result.model_dir, "what colour", max_new_tokens=2) is not None
    assert forge.sft(**settings) == result


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_instructlab_gets_our_arguments_and_its_log_is_read(
    model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own run_training builds the command line; what its own logger wrote is metrics.jsonl."""
    settings = given("sft", model_dir, tmp_path, "instructlab-training", max_steps=None, num_epochs=2, beta2=0.9, seed=5)
    result = forge.sft(**settings, sharding_strategy="NO_SHARD", disable_flash_attn=True)
    folder = tmp_path / "run" / "backend"
    arguments = json.loads((folder / "arguments.json").read_text())
    expected = {
        "data_path": f"{folder}/data.jsonl",
        "num_epochs": "2",
        "effective_batch_size": "4",
        "learning_rate": "0.002",
        "max_batch_len": "512",
        "seed": "5",
        "adamw_beta2": "0.9",
        "fsdp_sharding_strategy": "NO_SHARD",
        "disable_flash_attn": "true",
        "keep_last_checkpoint_only": "true",
    }
    assert {name: arguments.get(name) for name in expected} == expected
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    assert all(row["len"] == len(row["input_ids"]) == len(row["labels"]) for row in rows)
    assert len(rows) == 24
    found = [
        {name: line[name] for name in ("step", "samples", "loss", "lr", "loss_tokens")} for line in metrics(tmp_path / "run")
    ]
    assert found == [
        {"step": 1, "samples": 4, "loss": 6.0, "lr": 1e-3, "loss_tokens": 40},
        {"step": 2, "samples": 8, "loss": 3.0, "lr": 5e-4, "loss_tokens": 40},
    ]
    assert (result.steps, result.samples, result.loss, result.model_dir.name) == (2, 8, 3.0, "samples_8")
    assert capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.usefixtures("on_cpu")
def test_the_export_stops_where_a_named_template_ends_a_turn(model_dir: Path, tmp_path: Path) -> None:
    """The library copies what the model had; the run's export names the template's token too, and the log says so."""
    from transformers import GenerationConfig

    base = tmp_path / "base"
    shutil.copytree(model_dir, base)
    GenerationConfig(eos_token_id=0).save_pretrained(base)
    settings = given("sft", base, tmp_path, "instructlab-training", max_steps=None, num_epochs=1, chat_template="chatml")
    result = forge.sft(**settings, disable_flash_attn=True)
    assert GenerationConfig.from_pretrained(result.model_dir).eos_token_id == [0, 2]
    assert "chat_template: <|im_end|> ends a turn" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cpu_is_refused_by_name(backend: str, model_dir: Path, tmp_path: Path) -> None:
    """Their loops ask for a GPU: that is said before anything is written."""
    with pytest.raises(
        forge.SettingsError, match=f"backend={backend} computes on cuda or rocm alone, and the device here is cpu"
    ):
        forge.sft(**given("sft", model_dir, tmp_path, backend, max_steps=None))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cluster_says_how_many_processes(
    backend: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod's eight are eight; several nodes, of which each would train alone, are refused."""
    settings = given("sft", model_dir, tmp_path, backend, max_steps=None, effective_batch_size=8)
    monkeypatch.setenv("PET_NNODES", "1")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "8")
    assert "  nproc_per_node=8" in forge.dry_run(forge.sft, **settings)
    monkeypatch.setenv("PET_NNODES", "2")
    monkeypatch.setenv("PET_NODE_RANK", "0")
    monkeypatch.setenv("PET_MASTER_ADDR", "localhost")
    monkeypatch.setenv("PET_MASTER_PORT", "29400")
    with pytest.raises(forge.SettingsError, match=f"backend={backend} trains on one node, and PET_NNODES says .* 2"):
        forge.sft(**settings)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_dry_run_builds_the_real_classes(backend: str, model_dir: Path, tmp_path: Path) -> None:
    """The arguments are those of the libraries' own classes, which check them; nothing is left behind."""
    text = forge.dry_run(forge.sft, **given("sft", model_dir, tmp_path, backend, max_steps=None))
    assert "run_training:" in text
    assert "  learning_rate=0.002" in text
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("on_cpu")
def test_a_failure_of_the_library_is_in_the_log(model_dir: Path, tmp_path: Path) -> None:
    """A library that fails leaves its own log, no result, and a directory in which the same command begins anew."""
    settings = given("sft", model_dir, tmp_path, "mini-trainer", max_steps=1)
    (tmp_path / "bin" / "torchrun").write_text("#!/bin/sh\necho out of luck\nexit 3\n")
    for _ in range(2):
        with pytest.raises(forge.BackendError, match="backend=mini-trainer failed: .*training_log_node0.log"):
            forge.sft(**settings)
    assert "out of luck" in (tmp_path / "run" / "backend" / "training_log_node0.log").read_text()
    assert "failed: BackendError" in (tmp_path / "run" / "log.txt").read_text()
    assert not (tmp_path / "run" / "result.json").exists()


@pytest.mark.usefixtures("on_cpu")
def test_a_launcher_around_it_is_refused(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each rank would start a torchrun of its own."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29555")
    with pytest.raises(forge.SettingsError, match="starts torchrun itself"):
        forge.sft(**given("sft", model_dir, tmp_path, "mini-trainer"))
