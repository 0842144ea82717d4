"""Whole runs on rows with images: they are those of plain transformers, one sample a forward, however they are computed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

import forge
import forge_algos
import forge_data
from forge.memory import _forecast
from forge.run import _memory

from . import modalities, pictures, reference
from .three_steps import SETTINGS, figures, oracle, samples

if TYPE_CHECKING:
    from pathlib import Path

GIVEN: dict[str, Any] = {**SETTINGS, "effective_batch_size": 6, "max_tokens_per_gpu": 96}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the runs train."""
    return pictures.save(tmp_path_factory.mktemp("gemma3"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 conversations."""
    return pictures.rows(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="module")
def given(model: Path, data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(model), "data_path": str(data), **GIVEN}


@pytest.fixture(scope="module")
def whole(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> forge.RunResult:
    """A run with held-out rows."""
    return forge.sft(**given, validation_split=0.2, ckpt_output_dir=tmp_path_factory.mktemp("whole") / "run")


def test_losses_and_the_export(whole: forge.RunResult, model: Path, data: Path) -> None:
    """Losses, gradients and the held-out loss are plain transformers' with its processor; the tower is exported as read."""
    run, inputs = whole.output_dir, pictures.inputs_of(model, data)
    plain = modalities.plain(model)
    held_out = samples(
        (store := forge_data.TokenStore.open(run / "data" / "train").split(0.2, seed=42)[1]), [*range(len(store))], inputs
    )
    before, tokens = reference.evaluate(plain, held_out)
    expected = oracle(run, plain, held_out=0.2, inputs=inputs)
    assert figures(run, "loss") == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    assert whole.eval_before["eval_loss"] == pytest.approx(before, rel=1e-5)
    assert whole.eval_before["eval_loss_tokens"] == tokens
    stored, exported = load_file(model / "model.safetensors"), load_file(whole.model_dir / "model.safetensors")
    others = [name for name in stored if "language_model" not in name and "lm_head" not in name]
    assert others
    for name in others:
        assert torch.equal(stored[name], exported[name]), name
    assert any(not torch.equal(stored[name], exported[name]) for name in stored)
    # What is reported after training is measured on the export, loaded again.
    again = AutoModelForMultimodalLM.from_pretrained(whole.model_dir, dtype=torch.float32, attn_implementation="eager")
    assert whole.eval_after["eval_loss"] == pytest.approx(reference.evaluate(again, held_out)[0], rel=1e-5)
    assert "could not be measured" not in (run / "log.txt").read_text()


def test_the_memory_plan(given: dict[str, Any], model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take what was planned, with pixels, the tower's forward and its weights in float32; what is not counted is said."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    settings = {**given, "max_steps": 2}
    forge.sft(**settings, ckpt_output_dir=tmp_path / "run")
    about = json.loads((tmp_path / "run" / "memory.json").read_text())
    phases = {phase["name"]: phase for phase in about["phases"]}
    measured = phases["first steps"]["measured"]
    assert phases["first steps"]["planned"] == pytest.approx(measured, rel=0.01)
    assert phases["step"]["planned"] >= measured
    plain = AutoModelForMultimodalLM.from_pretrained(model)
    assert phases["step"]["parts"]["weights"] >= 4 * plain.num_parameters()
    assert "assumed: several samples with images in a row; a model that is given one takes less" in about["notes"]

    def needs_values(_: object) -> None:
        raise forge_algos.RehearsalError("a value")

    monkeypatch.setattr(_forecast, "with_rehearsed_images", needs_values)
    forge.sft(**settings, ckpt_output_dir=tmp_path / "other")
    text = (tmp_path / "other" / "log.txt").read_text()
    assert "pixels, and the forward of what computes on them, are not counted: a value" in text
