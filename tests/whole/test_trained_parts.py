"""Vision tower and projector that train: runs are those of plain transformers with torch's AdamW, however they are divided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

import forge
import forge_algos
import forge_data
import forge_packing
from forge.run import _memory

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import pictures, reference
from .conftest import write_rows
from .starts import sft_with_signal, weights
from .three_steps import SETTINGS, figures, samples
from .verbs import run_verb

GIVEN: dict[str, Any] = {
    **SETTINGS,
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 96,
    "weight_decay": 0.1,
    "save_dtype": "float32",
}
TOWER, PROJECTOR = {"freeze_vision_tower": False}, {"freeze_multi_modal_projector": False}
ALL = TOWER | PROJECTOR
ALONE = {**PROJECTOR, "freeze_language_model": True}
"""LLaVA's first stage."""
OF_PARTS = {"vision_tower": "vision_tower", "projector": "multi_modal_projector", "language": "language_model"}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model whose documents with images lie in padded lines, and one whose rows are packed and whose last layer is idle."""
    return {name: pictures.save(name, tmp_path_factory.mktemp(name)) for name in ("gemma3", "llava-before-last")}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 conversations; the first and the last have no images."""
    folder = tmp_path_factory.mktemp("images")
    return write_rows(folder / "rows.jsonl", [pictures.conversation(folder, each, (each // 3) % 3) for each in range(24)])


@pytest.fixture(scope="module")
def given(models: dict[str, Path], data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(models["gemma3"]), "data_path": str(data), **GIVEN}


def part_of(name: str) -> str:
    """Return the part of the two models that holds a weight."""
    found = [part for part in OF_PARTS.values() if part in name]
    return found[0] if found else "language_model"


def plain_steps(run: Path, model: Path, data: Path, trained: set[str]) -> tuple[Any, list[reference.Step]]:
    """Train plain transformers on the run's samples, one a forward, with torch's AdamW; a step without images counts too."""
    plain: Any = AutoModelForMultimodalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    inputs = pictures.inputs_of(model, data)
    store = forge_data.TokenStore.open(run / "data" / "train")
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    with_image = next(row for row in range(len(store)) if store[row].images)
    _, _, reached = reference.loss_and_gradients(plain, samples(store, [with_image], inputs))
    # Of what an image does not reach every gradient is zero to the bit.
    idle = {name for name, gradient in reached.items() if part_of(name) == "vision_tower" and not gradient.any()}
    moving = {name: p for name, p in plain.named_parameters() if part_of(name) in trained and name not in idle}
    groups = [{"params": [p for p in moving.values() if (p.dim() > 1) == m], "weight_decay": 0.1 * m} for m in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
    steps = []
    for step in range(plan.num_steps):
        loss, count, gradients = reference.loss_and_gradients(plain, samples(store, plan.samples(step).tolist(), inputs))
        gradients = {name: gradient for name, gradient in gradients.items() if name in moving}
        for name, gradient in reference.clip(gradients, 0.5).items():
            moving[name].grad = gradient
        optimizer.step()
        steps.append(reference.Step(loss, count, reference.norm(gradients), 1e-3))
    return plain, steps


def same_weights(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 2e-6) -> None:
    """The same names and, to rounding, numbers."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        # The scores of a query all move by the same with it: its gradient is rounding, which AdamW makes steps of.
        if name.endswith("k_proj.bias"):
            continue
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    ("name", "settings", "trained"),
    [
        ("gemma3", ALL, {"vision_tower", "multi_modal_projector", "language_model"}),
        ("llava-before-last", TOWER, {"vision_tower", "language_model"}),
        ("gemma3", ALONE, {"multi_modal_projector"}),
    ],
)
def test_losses_and_weights(
    name: str, settings: dict[str, Any], trained: set[str], models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms and all weights after three steps are plain AdamW's; what is frozen is exported as it was read."""
    given = GIVEN | {"model_path": str(models[name]), "data_path": str(data)}
    result = forge.sft(**given, **settings, ckpt_output_dir=tmp_path / "run")
    plain, expected = plain_steps(result.output_dir, models[name], data, trained)
    assert figures(result.output_dir) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(result.output_dir, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    before, after = load_file(models[name] / "model.safetensors"), load_file(result.model_dir / "model.safetensors")
    plain.save_pretrained(tmp_path / "plain")
    same_weights(after, load_file(tmp_path / "plain" / "model.safetensors"))
    moved = {part_of(key) for key, tensor in before.items() if not torch.equal(tensor.float(), after[key])}
    assert moved == trained
    text = (result.output_dir / "log.txt").read_text()
    assert "parts: weights that train: language_model " in text
    assert ("stay as they are: what an image becomes does not depend on them" in text) == ("vision_tower" in trained)
