"""Weights of rows and messages, from the file to the loss: each row counts as often as it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import forge

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .verbs import run_verb

ONE_STEP: dict[str, Any] = {"max_steps": 1, "effective_batch_size": 12, "learning_rate": 1e-3, "lint": "off"}


def weighted(number: int) -> list[dict[str, Any]]:
    """Conversations of which every third has a weight of its own, and every fourth an answer that counts less."""
    rows = conversations(number)
    for at, row in enumerate(rows):
        if at % 3 == 1:
            row["weight"] = (0.3, 2.0)[at % 2]
        if at % 4 == 2 and len(row["messages"]) == 2:
            row["messages"][-1]["weight"] = 0.5
    return rows


def lines_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def by_hand(model_dir: Path, rows: list[dict[str, Any]]) -> tuple[float, float]:
    """Return (mean, sum of weights) in float64, one sample at a time."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    total = count = 0.0
    for row in rows:
        plain = [{name: message[name] for name in ("role", "content")} for message in row["messages"]]
        example = forge.data.tokenize({"messages": plain}, tokenizer)
        weight = np.float32(row.get("weight", 1)) * np.float32(row["messages"][-1].get("weight", 1))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(example.input_ids)[None].long()).logits[0, :-1]
        targets = torch.tensor(example.labels)[1:].long()
        total += float(weight) * float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        count += float(weight) * int((targets != -100).sum())
    return total / count, count


@pytest.mark.parametrize("budget", [4096, 64])
def test_a_run(model_dir: Path, tmp_path: Path, budget: int) -> None:
    """The loss of a step and of an evaluation is the weighted mean over the rows, in one micro-batch or many."""
    rows = weighted(12)
    data = write_rows(tmp_path / "rows.jsonl", rows)
    forge.sft(
        model_path=model_dir,
        data_path=data,
        eval_data_path=data,
        ckpt_output_dir=tmp_path / "run",
        max_tokens_per_gpu=budget,
        **ONE_STEP,
    )
    loss, count = by_hand(model_dir, rows)
    before, step = lines_of(tmp_path / "run")[:2]
    assert (before["eval_loss"], before["eval_loss_tokens"]) == (pytest.approx(loss, rel=1e-5), pytest.approx(count, rel=1e-9))
    assert (step["loss"], step["loss_tokens"]) == (pytest.approx(loss, rel=1e-5), pytest.approx(count, rel=1e-9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "more"),
    ci_keeps(
        [("sft", {"loss": "dft"}), ("distill", {"teacher_path": "MODEL", "beta": 0.5})],
        [
            ("sft", {"loss": "dft"}),
            ("osft", {}),
            ("distill", {"teacher_path": "MODEL", "beta": 0.5}),
            ("pretrain", {"block_size": 32}),
        ],
    ),
)
def test_weights_reach_every_supervised_objective(verb: str, more: dict[str, Any], model_dir: Path, tmp_path: Path) -> None:
    """A weight of 0.5 for every row halves the count and leaves the mean; other weights move another step."""
    text = [{"text": row["messages"][-1]["content"] * 3} for row in conversations(12)]
    plain = text if verb == "pretrain" else conversations(12)
    more = {name: str(model_dir) if value == "MODEL" else value for name, value in more.items()}
    found = {}
    for name, weights in {"none": None, "half": [0.5] * 12, "some": [2.0, 0.1] * 6}.items():
        rows = plain if weights is None else [{**row, "weight": weight} for row, weight in zip(plain, weights, strict=True)]
        given = {
            "model_path": str(model_dir),
            "data_path": str(write_rows(tmp_path / f"{name}.jsonl", rows)),
            **ONE_STEP,
            **more,
        }
        run_verb(verb, {**given, "ckpt_output_dir": str(tmp_path / name)})
        found[name] = next(line for line in lines_of(tmp_path / name) if "grad_norm" in line)
    assert found["half"]["loss_tokens"] == pytest.approx(found["none"]["loss_tokens"] / 2, rel=1e-6)
    assert found["half"]["loss"] == pytest.approx(found["none"]["loss"], rel=1e-5, abs=1e-7)
    assert found["half"]["grad_norm"] == pytest.approx(found["none"]["grad_norm"], rel=1e-4, abs=1e-6)
    assert found["some"]["loss_tokens"] != pytest.approx(found["none"]["loss_tokens"], rel=1e-3)
    if verb != "distill":  # whose teacher is the model itself
        assert found["some"]["loss"] != pytest.approx(found["none"]["loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ci_keeps(["fsdp2"], ["fsdp2", "ddp"]))
def test_ranks_weigh_as_one_process(strategy: str, model_dir: Path, tmp_path: Path) -> None:
    """Two ranks, whose rows weigh unequally, take the steps of one process."""
    given = {
        "model_path": str(model_dir),
        "data_path": str(write_rows(tmp_path / "rows.jsonl", weighted(12))),
        "max_tokens_per_gpu": 64,
        **ONE_STEP,
        "max_steps": 3,
        "effective_batch_size": 4,
    }
    run_verb("sft", given | {"ckpt_output_dir": str(tmp_path / "one")})
    divided = given | {"ckpt_output_dir": str(tmp_path / "two"), "strategy": strategy}
    run_on_ranks(run_verb, 2, "sft", divided, str(tmp_path), joined=False)
    one, two = lines_of(tmp_path / "one"), lines_of(tmp_path / "two")
    assert len({line["loss_tokens"] % 1 for line in one} - {0.0}) > 0
    for name, close in (("loss", 1e-5), ("grad_norm", 1e-4), ("loss_tokens", 1e-9)):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=close)


@pytest.mark.slow
def test_documents(model_dir: Path, tmp_path: Path) -> None:
    """A document of weight 2 trains as the document twice, in blocks that cut it and join it to others."""
    texts = [{"text": f"the apple is red and number {n} is round " * 3} for n in range(4)]
    twice = [{**text, "weight": 2} for text in texts]
    found = []
    for name, rows in (("weight", twice), ("plain", texts)):
        data = write_rows(tmp_path / f"{name}.jsonl", rows)
        for crossing in (False, True):
            forge.pretrain(
                model_path=model_dir,
                data_path=data,
                ckpt_output_dir=tmp_path / f"{name}{crossing}",
                block_size=16,
                cross_documents=crossing,
                max_tokens_per_gpu=64,
                **ONE_STEP,
            )
            found.append(lines_of(tmp_path / f"{name}{crossing}")[0])
    for doubled, plain in zip(found[:2], found[2:], strict=True):
        assert doubled["loss"] == pytest.approx(plain["loss"], rel=1e-5)
        assert doubled["grad_norm"] == pytest.approx(plain["grad_norm"], rel=1e-4)
        assert doubled["loss_tokens"] == 2 * plain["loss_tokens"]
