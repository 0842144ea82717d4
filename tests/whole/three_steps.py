"""Three steps of a run on ragged samples, beside the reference's steps on the same samples."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

import forge_data
import forge_packing

from . import reference, tiny
from .conftest import write_rows
from .starts import metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import nn

    Inputs = Callable[[forge_data.TokenStore, int], Mapping[str, torch.Tensor]]
    """A store and the index of a sample → what a forward is given beside its ids."""

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
    # The reference has the plain loss; test_moe_aux_loss.py has the routers'.
    "moe_aux_loss": "off",
}


def rows(folder: Path) -> Path:
    """Ragged samples, two of them longer than a window or a convolution, as rows of ids and labels."""
    samples = [*tiny.ragged(), tiny.sample(61, 10), tiny.sample(40, 11, slice(20, None)), tiny.sample(3, 12)]
    return write_rows(folder / "rows.jsonl", [{"input_ids": s.input_ids, "labels": s.labels} for s in samples])


def figures(run: Path, name: str = "loss") -> list[float]:
    """A figure of every step."""
    return [line[name] for line in metrics(run) if "loss" in line]


def no_inputs(_store: forge_data.TokenStore, _row: int) -> dict[str, torch.Tensor]:
    """Return nothing: samples are ids alone."""
    return {}


def samples(store: forge_data.TokenStore, rows: list[int], inputs: Inputs = no_inputs) -> list[reference.Sample]:
    """Return samples of a store as the reference takes them."""
    return [reference.Sample(store[row].input_ids.tolist(), store[row].labels.tolist(), inputs(store, row)) for row in rows]


def oracle(run: Path, plain: nn.Module, *, held_out: float = 0.0, inputs: Inputs = no_inputs) -> list[reference.Step]:
    """The reference's steps on the samples of the run's plan, one document at a time through a plain model."""
    store = forge_data.TokenStore.open(run / "data" / "train")
    if held_out:
        store = store.split(held_out, seed=42)[0]
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    batches = [samples(store, plan.samples(step).tolist(), inputs) for step in range(plan.num_steps)]
    recipe = reference.Recipe(1e-3, 3, lr_scheduler="constant", max_grad_norm=0.5)
    return reference.train(plain, batches, recipe, lambda _name, _parameter: False)


def assert_as_plain(run: Path, model: Path, plain: nn.Module, inputs: Inputs, tower: str) -> Path:
    """A packed run's losses and gradients are a plain model's, what is beside the language is as read; returns the export."""
    expected = oracle(run, plain, inputs=inputs)
    assert figures(run) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    assert max(len(row) for row in plan.micro_batches(0, 0)) > 1
    (export,) = (run / "hf_format").glob("samples_*")
    stored, written = load_file(model / "model.safetensors"), load_file(export / "model.safetensors")
    beside = [name for name in stored if "language_model" not in name and "lm_head" not in name]
    assert any(tower in name for name in beside)
    assert all(torch.equal(stored[name], written[name]) for name in beside)
    return export
