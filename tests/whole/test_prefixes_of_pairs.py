"""Pairs of answers: a plan counts their prompt, and a system prompt of several, once; losses are those without sharing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import forge
import forge_algos
import forge_data
import forge_packing
from forge.run import _memory
from forge.tasks.items._pairs import Answers, Pairs

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .conftest import write_rows
from .starts import metrics
from .three_steps import figures
from .verbs import KINDS, rows_of, run_verb

VERBS = ["dpo", "orpo", "simpo", "kto", "reward"]
SYSTEM = {"role": "system", "content": "you know all fruit, " * 6}

KIND: dict[str, Any] = {**dict.fromkeys(VERBS, Pairs), "kto": Answers}


def tokens_of(batch: Any) -> int:
    """Tokens that go through the model: of the answers, and of their mismatches."""
    parts = [batch.groups] if hasattr(batch, "groups") else [batch.completions, batch.mismatched]
    return sum(len(part.input_ids) for part in parts)


def data(verb: str, folder: Path, number: int = 24) -> str:
    """Rows, three of four behind one system prompt."""
    rows = rows_of(KINDS[verb], number)
    for row in rows[number // 4 :]:
        row["prompt"].insert(0, SYSTEM)
    return str(write_rows(folder / "rows.jsonl", rows))


def settings_of(verb: str, model: Path, folder: Path) -> dict[str, Any]:
    settings = {"model_path": str(model), "data_path": data(verb, folder), "max_steps": 3, "validation_split": 0.25}
    settings |= {"effective_batch_size": 9, "max_tokens_per_gpu": 400, "lr_scheduler": "constant", "learning_rate": 1e-3}
    return settings | {"seed": 3, "eval_every_steps": 2}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["dpo", "kto"], VERBS))
def test_losses_on_one_rank_and_two(verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses, held-out ones too, are those of the run that shares nothing; micro-batches are fewer, and none is too large."""
    settings = settings_of(verb, model_dir, tmp_path)
    alone, one, two = (tmp_path / name for name in ("alone", "one", "two"))
    getattr(forge, verb)(**settings, attention="sdpa", ckpt_output_dir=str(alone))
    sizes, kind = [], KIND[verb]
    batch = kind.batch

    def sized(items: Any, indices: Any) -> Any:
        found = batch(items, indices)
        sizes.append(tokens_of(found))
        return found

    monkeypatch.setattr(kind, "batch", sized)
    getattr(forge, verb)(**settings, ckpt_output_dir=str(one))
    run_on_ranks(run_verb, 2, verb, {**settings, "strategy": "ddp", "ckpt_output_dir": str(two)}, joined=False)
    for name in ("loss", "grad_norm"):
        expected = figures(alone, name)
        assert figures(one, name) == pytest.approx(expected, rel=1e-6 if name == "loss" else 1e-5, abs=1e-7)
        assert figures(two, name) == pytest.approx(expected, rel=1e-6 if name == "loss" else 1e-5, abs=1e-7)
    held_out = [[line["eval_loss"] for line in metrics(run) if "eval_loss" in line] for run in (alone, one, two)]
    assert held_out[1] == pytest.approx(held_out[0], rel=1e-6)
    assert held_out[2] == pytest.approx(held_out[0], rel=1e-6)
    plans = [forge_packing.BatchPlan.load(run / "plan" / "plan.npz") for run in (alone, one)]
    assert plans[0].prefixes is plans[0].repeated is None
    assert plans[0].order_fingerprint == plans[1].order_fingerprint
    count = [sum(len(plan.micro_batches(step)) for step in range(3)) for plan in plans]
    assert count[1] < 0.75 * count[0]
    assert max(sizes) <= 400


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "words", "kept"),
    [
        ({"adapter": "lora", "lora_dropout": 0.1}, "prompts: computed once a pair:", (False, True)),
        ({"attention": "eager"}, "prompts: computed once an answer:", (False, False)),
        ({"packing": "off"}, None, (False, False)),
    ],
    ids=["dropout", "attention", "documents alone"],
)
def test_what_is_not_shared_is_planned_so(
    settings: dict[str, Any], words: str | None, kept: tuple[bool, bool], model_dir: Path, tmp_path: Path
) -> None:
    """With dropout each pair begins by itself, with its prompt once; where nothing is shared, all is planned as it is."""
    run = tmp_path / "run"
    forge.orpo(**{**settings_of("orpo", model_dir, tmp_path), **settings, "max_steps": 1}, ckpt_output_dir=str(run))
    log, plan = (run / "log.txt").read_text(), forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    assert (words in log) if words else ("prompts:" not in log)
    assert (plan.prefixes is not None, plan.repeated is not None) == kept


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_a_model_that_cannot_share_after_all(
    verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The micro-batches are planned anew, said so, and none is over max_tokens_per_gpu."""
    monkeypatch.setattr("forge_algos.shares_prompts", lambda *_, **__: (False, "it is a test"))
    run = tmp_path / "run"
    getattr(forge, verb)(**settings_of(verb, model_dir, tmp_path) | {"max_steps": 1}, ckpt_output_dir=str(run))
    assert "micro-batches are planned anew, each" in (run / "log.txt").read_text()
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    assert plan.prefixes is plan.repeated is None


@pytest.mark.slow
def test_a_live_reference_that_shares_nothing(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the second model, in a dtype of its own, was found to share no prompts, no row has shared ones."""
    plainly = forge_algos.isolation._prompt_sharing._answer

    def answer(model: Any, *more: Any) -> Any:
        trained = any(weight.requires_grad for weight in model.parameters())
        return plainly(model, *more) if trained else (False, "it is a test")

    monkeypatch.setattr(forge_algos.isolation._prompt_sharing, "_answer", answer)
    run = tmp_path / "run"
    forge.dpo(**settings_of("dpo", model_dir, tmp_path) | {"max_steps": 1, "reference": "live"}, ckpt_output_dir=str(run))
    assert "prompts: computed once an answer: it is a test" in (run / "log.txt").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(("verb", "one"), [("orpo", "pair"), ("kto", "answer")])
def test_dropout_of_the_model(verb: str, one: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The log says of what the micro-batches are planned anew: of pairs, or of KTO's answers."""
    monkeypatch.setattr("forge_algos.first_dropout", lambda *_: "a dropout")
    run = tmp_path / "run"
    getattr(forge, verb)(**settings_of(verb, model_dir, tmp_path) | {"max_steps": 1}, ckpt_output_dir=str(run))
    assert f"micro-batches are planned anew, each {one} with what it begins with" in (run / "log.txt").read_text()


@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_the_plan_counts_what_is_put_together(verb: str, model_dir: Path, tmp_path: Path) -> None:
    """Of any micro-batch, and of rows that were held out, places are the tokens of its rows."""
    kind = KIND[verb]
    store = forge_data.prepare(data(verb, tmp_path), str(model_dir), tmp_path / "store", progress=False)
    for part in store.split(0.25, seed=1):
        items = kind(part).using(share_prompt=True, share_prefix=True, references=None)
        for planned in (items.planned, {"repeated": items.repeated}):
            across = "prefixes" in planned
            rows = items.using(share_prompt=True, share_prefix=across, references=None)
            plan = forge_packing.plan(items.lengths, batch_size=5, max_tokens=400, **planned)
            for step in range(plan.num_steps):
                for indices in plan.micro_batches(step):
                    found = tokens_of(rows.batch(indices))
                    # Some prompts begin with more alike than the prefix that the plan knows.
                    assert (found <= plan.places(indices)) if across else (found == plan.places(indices))
    if verb == "dpo":
        assert items.repeated is not None
        found = [row[0].input_ids for row in ([items.store[int(i)] for i in pair] for pair in items.rows)]
        assert np.all(items.repeated < [len(ids) for ids in found])


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["dpo"], ["dpo", "kto"]))
def test_references_are_scored_in_shared_rows(
    verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of references hold what is computed, none is too large, and the stored numbers are those without sharing."""
    scored: dict[str, list[int]] = {}
    original = forge_algos.reference_logps

    def counted(model: Any, batches: Any, **how: Any) -> Any:
        rows = list(batches)
        scored[run].extend(len(row.input_ids) for row in rows)
        return original(model, rows, **how)

    monkeypatch.setattr(forge_algos, "reference_logps", counted)
    settings = settings_of(verb, model_dir, tmp_path) | {"max_steps": 1, "reference": "stored"}
    found = []
    for run, attention in (("alone", "sdpa"), ("shared", "auto")):
        scored[run] = []
        getattr(forge, verb)(**settings, attention=attention, ckpt_output_dir=str(tmp_path / run))
        file = tmp_path / run / "data" / "train.reference.safetensors"
        found.append(load_file(file)["logps"])
    assert max(scored["shared"]) <= 400
    assert len(scored["shared"]) < 0.75 * len(scored["alone"])
    assert found[1] == pytest.approx(found[0], rel=1e-5, nan_ok=True)


@pytest.mark.lane
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["dpo", "kto"])
def test_a_step_takes_what_was_planned(verb: str, larger_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 3 percent, where prompts are long and rows are filled with what is computed."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    rows = rows_of(KINDS[verb], 32)
    for row in rows:
        row["prompt"].insert(0, {**SYSTEM, "content": SYSTEM["content"] * 4})
    settings = {"model_path": str(larger_model), "data_path": str(write_rows(tmp_path / "rows.jsonl", rows))}
    settings |= {"effective_batch_size": 16, "max_tokens_per_gpu": 2048, "max_steps": 3}
    getattr(forge, verb)(**settings, ckpt_output_dir=str(tmp_path / "run"))
    phases = {phase["name"]: phase for phase in json.loads((tmp_path / "run" / "memory.json").read_text())["phases"]}
    steps = phases["first steps"]
    print(verb, steps["planned"] / steps["measured"], phases["step"]["planned"] / steps["measured"])
    assert steps["planned"] == pytest.approx(steps["measured"], rel=0.03)
    assert phases["step"]["planned"] == pytest.approx(steps["measured"], rel=0.03)
