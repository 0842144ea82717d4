"""The migration pages beside the libraries themselves: what stands in their column are settings that those have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

PAGES = Path(__file__).resolve().parents[2] / "docs" / "migrating"


def first_column(page: str, section: str = "") -> set[str]:
    """Names in the first column of the tables of a page, or of one section of it."""
    text = (PAGES / page).read_text()
    if section:
        text = text.partition(f"## {section}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*) \|", text, re.MULTILINE)
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert names, section
    return names


def test_instructlab_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page of instructlab-training names fields of its arguments, and its example makes them."""
    theirs = pytest.importorskip(
        "instructlab.training", reason="instructlab-training is missing here: `hatch run peers:test`", exc_type=ImportError
    )
    known = {*theirs.TrainingArgs.model_fields, *theirs.TorchrunArgs.model_fields}
    assert first_column("instructlab-training.md") <= known
    given: list[object] = []
    monkeypatch.setattr(theirs, "run_training", lambda *arguments: given.extend(arguments))
    (code,) = re.findall(r"```python\n(from instructlab.*?)```", (PAGES / "instructlab-training.md").read_text(), re.DOTALL)
    exec(code, {})
    assert given[1].max_batch_len == 25000


def fields(*classes: type) -> set[str]:
    return {field.name for each in classes for field in dataclasses.fields(each)}


def test_trl() -> None:
    """The page of TRL names fields of its configurations, arguments of its trainers, and PEFT's."""
    trl = pytest.importorskip("trl", reason="TRL is not installed here: `hatch run peers:test`")
    from peft import LoraConfig

    trainer = {"model", "train_dataset", "eval_dataset", "ref_model", "reward_funcs", "callbacks"}
    assert first_column("trl.md", "SFTConfig and TrainingArguments") <= fields(trl.SFTConfig) | trainer
    assert first_column("trl.md", "LoraConfig") <= fields(LoraConfig) | {"BitsAndBytesConfig"}
    preferences = fields(trl.DPOConfig, trl.KTOConfig, trl.RewardConfig)
    assert first_column("trl.md", "DPOConfig, KTOConfig, RewardConfig") <= preferences | trainer
    assert first_column("trl.md", "GRPOConfig, RLOOConfig") <= fields(trl.GRPOConfig, trl.RLOOConfig) | trainer
    assert all(hasattr(trl, name) for name in first_column("trl.md", "Trainers"))


def test_mini_trainer() -> None:
    """The page of mini-trainer names fields of its arguments."""
    theirs = pytest.importorskip(
        "mini_trainer.training_types", reason="mini-trainer is not installed here: `hatch run peers:test`", exc_type=ImportError
    )
    known = fields(theirs.TrainingArgs, theirs.TorchrunArgs, theirs.PretrainingConfig)
    assert first_column("mini-trainer.md") <= known
