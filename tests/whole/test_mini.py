"""forge.mini: mini-trainer's calls, flags and processed rows train."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.mini import PretrainingConfig, TorchrunArgs, TrainingArgs, run_training
from forge.mini._command import main

from .conftest import conversations, write_rows
from .starts import metrics, untimed


@pytest.fixture(scope="module")
def processed(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows as mini-trainer wants them: input_ids, labels, len, num_loss_counted_tokens."""
    tokenizer = forge.data.load_tokenizer(str(model_dir))
    rows: list[dict[str, Any]] = []
    for row in conversations():
        ids = tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        labels = [-100] * 4 + ids[4:]
        rows.append({"input_ids": ids, "labels": labels, "len": len(ids), "num_loss_counted_tokens": len(ids) - 4})
    return write_rows(tmp_path_factory.mktemp("processed") / "data.jsonl", rows)


@pytest.fixture
def given(model_dir: Path, processed: Path, tmp_path: Path) -> dict[str, Any]:
    """Arguments of a short training."""
    return {
        "model_name_or_path": str(model_dir),
        "data_path": str(processed),
        "batch_size": 6,
        "max_tokens_per_gpu": 256,
        "learning_rate": 1e-3,
        "output_dir": str(tmp_path / "run"),
    }


@pytest.mark.slow
def test_run_training(given: dict[str, Any], tmp_path: Path) -> None:
    """The same figures as `forge.sft` with the settings that they stand for; token mode counts what mini-trainer counts."""
    args = TrainingArgs(
        **given, training_mode="token", max_tokens=300, num_warmup_steps=1, validation_split=0.2, save_dtype="bf16"
    )
    result = run_training(TorchrunArgs(), args)
    same = forge.sft(
        model_path=given["model_name_or_path"],
        data_path=given["data_path"],
        ckpt_output_dir=str(tmp_path / "same"),
        effective_batch_size=6,
        max_tokens_per_gpu=256,
        learning_rate=1e-3,
        warmup_steps=1,
        validation_split=0.2,
        max_tokens=300,
        save_dtype="bfloat16",
        activation_checkpointing=True,
    )
    assert untimed(result.output_dir) == untimed(same.output_dir)
    learned = [line["loss_tokens"] for line in metrics(result.output_dir) if "loss" in line]
    assert sum(learned) >= 300 > sum(learned[:-1])
    # The same call again is the finished run.
    assert run_training(TorchrunArgs(), args).samples == result.samples


def test_osft_trains_what_it_trains_there(given: dict[str, Any]) -> None:
    """Factors of the targets, and embeddings, head, norms and biases beside them."""
    result = run_training(
        TorchrunArgs(), TrainingArgs(**given, osft=True, osft_unfreeze_rank_ratio=0.5, training_mode="step", max_steps=2)
    )
    assert result.steps == 2
    assert (result.model_dir / "model.safetensors").exists()
    log = (result.output_dir / "log.txt").read_text()
    assert "norms      160 of 160" in log


def test_pretraining_takes_the_same_rows(given: dict[str, Any]) -> None:
    """Blocks of one stream of documents, every token learned."""
    result = run_training(TorchrunArgs(), TrainingArgs(**given, pretraining_config=PretrainingConfig(block_size=32)))
    assert result.steps == len([line for line in metrics(result.output_dir) if "loss" in line]) > 1


def test_the_command(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Its flags, with its command's defaults: a constant rate after the warm-up, seed 67."""
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    more = ["--osft", "--osft-unfreeze-rank-ratio", "0.25", "--osft-target-patterns", "q_proj, k_proj"]
    assert main([*words, *more, "--training-mode", "step", "--max-steps", "2", "--num-warmup-steps", "1"]) == 0
    run = Path(given["output_dir"])
    assert capsys.readouterr().out.strip() == str(run / "hf_format" / "samples_12")
    config = (run / "config.yaml").read_text()
    for line in ("seed: 67", "lr_scheduler: constant", "target_modules: [q_proj, k_proj]", "unfreeze_rank_ratio: 0.25"):
        assert line in config
    assert json.loads((run / "run.json").read_text())["verb"] == "osft"


@pytest.mark.lane
@pytest.mark.slow
def test_the_command_under_torchrun(given: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks make the steps of one, and print the model once."""
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words += ["--training-mode", "token", "--max-tokens", "200"]
    line = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "forge.mini", *words]
    done = subprocess.run(line, capture_output=True, text=True, timeout=480, check=False)
    assert done.returncode == 0, done.stderr
    assert "ranks: 2, " in (tmp_path / "run" / "log.txt").read_text()
    assert len(done.stdout.split()) == 1
    alone = words.copy()
    alone[alone.index(str(tmp_path / "run"))] = str(tmp_path / "alone")
    assert main(alone) == 0
    losses = [[each["loss"] for each in metrics(tmp_path / name)] for name in ("run", "alone")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
