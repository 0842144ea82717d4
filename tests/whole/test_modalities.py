"""Checkpoints of several modalities train on text: the language part learns, the rest is written back bit for bit."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForMultimodalLM

import forge
import forge_data
import forge_packing

from . import modalities, reference, tiny
from .conftest import write_rows
from .starts import metrics

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "effective_batch_size": 8,
    "max_tokens_per_gpu": 64,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "max_grad_norm": 0.5,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Callable[[str], Path]:
    """A directory of the tiny model of a name, with a tokenizer and processor files."""
    made: dict[str, Path] = {}

    def directory(name: str) -> Path:
        if name not in made:
            made[name] = modalities.save(name, tmp_path_factory.mktemp("modalities"), model_dir)
        return made[name]

    return directory


def rows(folder: Path) -> Path:
    """Ragged samples, two of them longer than a window, as rows of ids and labels."""
    samples = [*tiny.ragged(), tiny.sample(61, 10), tiny.sample(40, 11, slice(20, None)), tiny.sample(3, 12)]
    return write_rows(folder / "rows.jsonl", [{"input_ids": s.input_ids, "labels": s.labels} for s in samples])


def figures(run: Path, name: str) -> list[float]:
    """A figure of every step."""
    return [line[name] for line in metrics(run) if "loss" in line]


def oracle(run: Path, model: Path) -> list[reference.Step]:
    """The reference's steps on the samples of the run's plan, one document at a time through the same class."""
    store = forge_data.TokenStore.open(run / "data" / "train")
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    batches = [
        [reference.Sample(store[row].input_ids.tolist(), store[row].labels.tolist()) for row in plan.samples(step).tolist()]
        for step in range(plan.num_steps)
    ]
    recipe = reference.Recipe(1e-3, 3, lr_scheduler="constant", max_grad_norm=0.5)
    return reference.train(modalities.plain(model), batches, recipe, lambda _name, _parameter: False)


def other_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Stored tensors that are no part of the language model."""
    tensors = load_file(directory / "model.safetensors")
    return {name: t for name, t in tensors.items() if "language_model" not in name and "lm_head" not in name}


@pytest.mark.parametrize("packing", ["auto", "off"])
@pytest.mark.parametrize("name", sorted(modalities.CONFIGS))
def test_losses_and_the_export(name: str, packing: str, saved: Callable[[str], Path], tmp_path: Path) -> None:
    """Losses and gradient norms are those of plain transformers; all but the language part is exported unchanged."""
    run, model = tmp_path / "run", saved(name)
    result = forge.sft(
        model_path=str(model), data_path=str(rows(tmp_path)), ckpt_output_dir=str(run), packing=packing, **SETTINGS
    )
    expected = oracle(run, model)
    assert figures(run, "loss") == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    export = result.model_dir
    before, after = load_file(model / "model.safetensors"), load_file(export / "model.safetensors")
    assert before.keys() == after.keys()
    others = other_tensors(model)
    assert others
    for tensor, value in others.items():
        assert torch.equal(value, after[tensor]), tensor
    assert any(not torch.equal(value, after[tensor]) for tensor, value in before.items())
    source, written = (json.loads((folder / "config.json").read_text()) for folder in (model, export))
    assert written["architectures"] == source["architectures"]
    for file in modalities.PROCESSOR_FILES:
        assert (export / file).read_bytes() == (model / file).read_bytes()
    _, report = AutoModelForMultimodalLM.from_pretrained(export, output_loading_info=True)
    assert not any(report.values())
