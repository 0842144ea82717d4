"""Reward models of rows with images: runs are those of plain transformers, one answer a forward with its processor's arrays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoModelForSequenceClassification, AutoProcessor

import forge
import forge_data
import forge_packing

from ..lanes import ci_keeps
from . import pictures
from .conftest import write_rows
from .starts import metrics
from .three_steps import SETTINGS, figures
from .verbs import assert_two_ranks_as_one

GIVEN: dict[str, Any] = {name: value for name, value in SETTINGS.items() if name != "moe_aux_loss"} | {
    "effective_batch_size": 6,
    "max_tokens_per_gpu": 160,
    "validation_split": 0.2,
    "centering": 0.01,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reward model that the runs train."""
    made = tmp_path_factory.mktemp("gemma3")
    return pictures.save("gemma3", made, AutoModelForSequenceClassification, num_labels=1)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 pairs with margins."""
    file = pictures.pairs(tmp_path_factory.mktemp("pairs"))
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return write_rows(file, [row | {"margin": 0.1 * (at % 4)} for at, row in enumerate(rows)])


@pytest.fixture(scope="module")
def given(model: Path, data: Path) -> dict[str, Any]:
    """Settings of three steps."""
    return {"model_path": str(model), "data_path": str(data), **GIVEN}


def plain_model(model: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The saved model as transformers itself loads it, its language part and its head trainable."""
    plain: Any = AutoModelForSequenceClassification.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    plain.requires_grad_(False)
    for part in (plain.model.language_model, plain.score):
        part.requires_grad_(True)
    return plain


class Pairs:
    """Pairs of a store, as the model's processor reads them."""

    def __init__(self, store: forge_data.TokenStore, data: Path, model: Path) -> None:
        lines = [json.loads(line) for line in data.read_text().splitlines()]
        rows = [lines[int(store.source(at).rpartition(":")[2]) - 1] for at in store.pairs[:, 0].tolist()]
        self.margins = [row["margin"] for row in rows]
        self.found: list[float] = []
        """The chosen answer's reward less the rejected one's, a mean for each loss."""
        self.sides = [[pictures.read(model, data.parent, row["prompt"] + row[side]) for side in SIDES] for row in rows]
        assert [[ids for ids, _ in both] for both in self.sides] == [
            [store[at].input_ids.tolist() for at in both] for both in store.pairs.tolist()
        ]

    def loss(self, plain: Any, taken: list[int]) -> torch.Tensor:
        """Equation 1 of arXiv 2203.02155, with a margin and a penalty of the rewards' sum, one answer a forward."""
        terms, margins = [], []
        for at in taken:
            chosen, rejected = (
                plain(torch.tensor([ids]), use_cache=False, **made).logits[0, 0] for ids, made in self.sides[at]
            )
            centered = GIVEN["centering"] * (chosen + rejected) ** 2
            terms.append(-logsigmoid(chosen - rejected - self.margins[at]) + centered)
            margins.append(float(chosen.detach() - rejected.detach()))
        self.found.append(sum(margins) / len(margins))
        return torch.stack(terms).mean()


SIDES = ("chosen", "rejected")


@pytest.mark.parametrize(("adapted", "more"), [(False, {}), pytest.param(True, {"packing": "off"}, marks=pytest.mark.slow)])
def test_losses_are_those_of_plain_transformers(
    adapted: bool, more: dict[str, Any], given: dict[str, Any], model: Path, data: Path, tmp_path: Path
) -> None:
    """Losses, gradient norms and held-out losses, of all weights and of an adapter; transformers loads the export."""
    plain = plain_model(model)
    if adapted:
        plain = pictures.with_adapter(plain, lambda: plain_model(model), tmp_path / "adapter", "SEQ_CLS")
        more = more | {"adapter": "lora", "adapter_path": str(tmp_path / "adapter")}
    run = forge.reward(**given | more, ckpt_output_dir=tmp_path / "run")
    train, held_out = forge_data.TokenStore.open(run.output_dir / "data" / "train").split(0.2, seed=42)
    plan = forge_packing.BatchPlan.load(run.output_dir / "plan" / "plan.npz")
    pairs, others = (Pairs(store, data, model) for store in (train, held_out))
    every = list(range(len(others.sides)))

    def held() -> float:
        with torch.no_grad():
            return float(others.loss(plain, every))

    before = held()
    expected = pictures.steps(plain, plan, lambda taken: pairs.loss(plain, taken))
    measured = [line["eval_loss"] for line in metrics(run.output_dir) if "eval_loss" in line]
    assert measured[:2] == pytest.approx([before, held()], rel=1e-5)
    assert figures(run.output_dir) == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert figures(run.output_dir, "grad_norm") == pytest.approx([norm for _, norm in expected], rel=1e-4)
    assert figures(run.output_dir, "margin") == pytest.approx(pairs.found, rel=1e-5, abs=1e-5)
    log = (run.output_dir / "log.txt").read_text()
    assert "could not be measured" not in log
    assert "images, counted in each of a row's samples, for which" in log
    if not adapted:
        _, report = AutoModelForSequenceClassification.from_pretrained(run.model_dir, output_loading_info=True)
        assert not any(report.values())
        AutoProcessor.from_pretrained(run.model_dir)
        card = (forge.export(run.output_dir, tmp_path / "export") / "README.md").read_text()
        assert "AutoModelForSequenceClassification, AutoProcessor" in card
        assert "image-text-to-text" not in card


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps([], ["ddp", "fsdp2"]))
def test_two_ranks(strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Divided it trains as on one rank, also where a rank's rows have no images."""
    data = pictures.pairs(tmp_path, 12, images=2)
    settings = given | {"data_path": str(data), "effective_batch_size": 3, "strategy": strategy}
    assert_two_ranks_as_one("reward", settings, tmp_path, ("loss", "margin", "grad_norm", "eval_loss"))
