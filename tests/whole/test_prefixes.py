"""Samples that begin alike, with one system prompt for instance: it is computed once a micro-batch, and losses are the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import forge
import forge_algos
import forge_data
import forge_packing
from forge.memory._forecast import _largest_batch, largest_micro_batch
from forge.tasks.items._samples import Samples
from forge.verbs._sft import _in_common

from ..ranks import run_on_ranks
from . import tiny
from .conftest import write_rows
from .starts import metrics
from .three_steps import SETTINGS, figures, oracle
from .verbs import KINDS, rows_of, run_verb

if TYPE_CHECKING:
    from collections.abc import Callable

TOOLS = tiny.sample(24, 40, slice(0, None)).input_ids
"""What most samples begin with."""


def rows(folder: Path) -> Path:
    """Ragged samples, two of three behind a prefix of 24 tokens; where all is learned, the prefix is too."""
    found = []
    for at in range(24):
        own = tiny.sample(4 + at % 7, 50 + at, slice(at % 2, None))
        masked = at % 5 != 0
        if at % 3:
            found.append({"input_ids": TOOLS + own.input_ids, "labels": ([-100] * 24 if masked else TOOLS) + own.labels})
        else:
            found.append({"input_ids": own.input_ids, "labels": own.labels})
    return write_rows(folder / "rows.jsonl", found)


@pytest.fixture(scope="module")
def made(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Settings of three steps on them."""
    folder = tmp_path_factory.mktemp("prefixes")
    return {**SETTINGS, "max_tokens_per_gpu": 128, "model_path": str(model_dir), "data_path": str(rows(folder))}


def log(run: Path) -> str:
    return (run / "log.txt").read_text()


@pytest.mark.slow
def test_losses_are_those_of_each_sample_alone(made: dict[str, Any], tmp_path: Path) -> None:
    """Three steps are the reference's, one sample at a time; tokens are the samples', whatever was computed of them."""
    run, plain = tmp_path / "run", tmp_path / "plain"
    forge.sft(**made, ckpt_output_dir=str(run))
    assert "prefixes: computed once a micro-batch, where samples begin alike (57% of" in log(run)
    expected = oracle(run, tiny.plain(made["model_path"]))
    assert figures(run) == pytest.approx([step.loss for step in expected], rel=1e-6)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-5)
    forge.sft(**made, attention="sdpa", ckpt_output_dir=str(plain))
    assert "prefixes: computed for each sample" in log(plain)
    assert "attention 'sdpa' does not know kv_rows" in log(plain)
    for name in ("samples", "tokens", "loss_tokens"):
        assert figures(run, name) == figures(plain, name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"adapter": "lora", "lora_dropout": 0.1}, ": base_model"),
        ({"neftune_alpha": 5.0}, ": neftune_alpha=5 draws noise for each sample"),
        ({"effective_batch_size": 1}, None),
    ],
    ids=["dropout", "noise", "single samples"],
)
def test_where_each_computes_its_own(
    settings: dict[str, Any], reason: str | None, made: dict[str, Any], tmp_path: Path
) -> None:
    """What is drawn at random is drawn for each sample; a run with nothing in common does not mention prefixes."""
    run = tmp_path / "run"
    forge.sft(**{**made, **settings, "max_steps": 1}, ckpt_output_dir=str(run))
    assert (reason in log(run)) if reason else ("prefixes:" not in log(run))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"cp_size": 2}], ids=["data parallel", "context parallel"])
def test_two_ranks_and_a_resumed_run(settings: dict[str, Any], made: dict[str, Any], tmp_path: Path) -> None:
    """Losses are those of one rank, of held-out rows too; a run that goes on after its first step is the whole one."""
    one, two, parts = (str(tmp_path / name) for name in ("one", "two", "parts"))
    made = {**made, "validation_split": 0.25}
    forge.sft(**made, ckpt_output_dir=one)
    run_on_ranks(run_verb, 2, "sft", {**made, "strategy": "fsdp2", **settings, "ckpt_output_dir": two}, joined=False)
    assert "prefixes: computed once a micro-batch" in log(Path(two))
    assert figures(Path(two)) == pytest.approx(figures(Path(one)), rel=1e-5)
    held_out = [[line["eval_loss"] for line in metrics(Path(run)) if "eval_loss" in line] for run in (one, two)]
    assert held_out[0] == pytest.approx(held_out[1], rel=1e-5)
    if not settings:
        forge.sft(**{**made, "max_steps": 1}, full_state_every_steps=1, keep_full_state=True, ckpt_output_dir=parts)
        forge.sft(**made, full_state_every_steps=1, ckpt_output_dir=parts)
        assert figures(Path(parts)) == figures(Path(one))


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["dpo", "orpo", "kto", "reward", "distill"])
def test_other_verbs(verb: str, model_dir: Path, tmp_path: Path) -> None:
    """Pairs, answers and a teacher's rows behind one system prompt: losses and counts as where each is computed by itself."""
    found = rows_of(KINDS[verb], 12)
    for row in found:
        row["messages" if "messages" in row else "prompt"].insert(0, {"role": "system", "content": "you know all fruit, " * 3})
    settings = {"model_path": str(model_dir), "data_path": str(write_rows(tmp_path / "rows.jsonl", found)), "max_steps": 2}
    settings |= {"effective_batch_size": 6, "lr_scheduler": "constant", "learning_rate": 1e-3}
    settings |= {"teacher_path": str(model_dir)} if verb == "distill" else {}
    runs = [tmp_path / "shared", tmp_path / "alone"]
    computed = []
    for run, more in zip(runs, [{}, {"attention": "sdpa"}], strict=True):
        seen = computed_tokens(lambda run=run, more=more: getattr(forge, verb)(**settings, **more, ckpt_output_dir=str(run)))
        computed.append(seen)
    # Pairs alone compute their prompt twice too.
    # Of pairs that share no more than their prompts 0.56 would be computed, of answers and rows all.
    assert computed[0] < 0.51 * computed[1]
    for name in ("loss", "grad_norm"):
        assert figures(runs[0], name) == pytest.approx(figures(runs[1], name), rel=1e-5, abs=1e-7)
    assert figures(runs[0], "samples") == figures(runs[1], "samples")


def computed_tokens(work: Callable[[], Any]) -> int:
    """Count the positions that layers are given in training while something works."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    seen = 0

    def count(module: Any, args: Any) -> None:
        nonlocal seen
        if isinstance(module, LlamaMLP) and module.training:
            seen += args[0].shape[:-1].numel()

    handle = torch.nn.modules.module.register_module_forward_pre_hook(count)
    try:
        work()
    finally:
        handle.remove()
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("shares", [True, False])
def test_rows_are_filled_with_what_is_computed(
    shares: bool, made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prefix takes room once, in rows that are trained on and held out; where it is not shared after all, each time."""
    if not shares:
        monkeypatch.setattr(forge_algos, "shares_prompts", lambda *_, **__: (False, "it is a test"))
    kind, rows = "collate_shared" if shares else "collate", []
    collate = getattr(forge_packing, kind)
    monkeypatch.setattr(forge_packing, kind, lambda *args, **more: rows.append(collate(*args, **more)) or rows[-1])
    run = tmp_path / "run"
    forge.sft(**{**made, "max_tokens_per_gpu": 64, "validation_split": 0.25}, ckpt_output_dir=str(run))
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    assert plan.prefix_tokens is not None
    assert plan.prefix_tokens.tolist() == [24]
    used = plan if shares else plan.alone()
    planned = [used.places(m) for step in range(plan.num_steps) for m in used.micro_batches(step)]
    sizes = [len(row.input_ids) for row in rows]
    assert max(sizes) <= 64
    assert not Counter(planned) - Counter(sizes)
    assert ("micro-batches are divided anew" in log(run)) is not shares
    assert (len(planned) < sum(len(plan.alone().micro_batches(step)) for step in range(plan.num_steps))) is shares


def test_the_plan_rehearses_the_micro_batch_of_which_most_is_computed(model_dir: Path, tmp_path: Path) -> None:
    """Rows that share most of their tokens are not the largest, though they have more."""
    own = [tiny.sample(40, 70 + at).input_ids for at in range(4)]
    shared = [own[0] + [at, at + 1] for at in range(4)]
    path = write_rows(tmp_path / "rows.jsonl", [{"input_ids": ids, "labels": ids} for ids in [*shared, *own]])
    store = forge_data.prepare(str(path), str(model_dir), tmp_path / "store", progress=False)
    items = Samples(store).sharing(share_prefix=True)
    plan = forge_packing.plan(store.lengths, batch_size=4, max_tokens=200, shuffle=False)
    worst, _ = largest_micro_batch(plan)
    assert sorted(worst.tolist()) == [0, 1, 2, 3]
    assert len(items.batch(worst).input_ids) == 48
    assert len(_largest_batch(plan, items, worst).input_ids) == 160
    assert len(_largest_batch(plan, items.sharing(share_prefix=False), worst).input_ids) == 168


def test_all_ranks_are_looked_at(model_dir: Path, tmp_path: Path) -> None:
    """Samples that are together on the last ranks are shared, though the first one has none of them."""
    own = [tiny.sample(40, 70 + at).input_ids for at in range(12)]
    found = [TOOLS + ids[:2] if at < 4 else ids for at, ids in enumerate(own)]
    path = write_rows(tmp_path / "rows.jsonl", [{"input_ids": ids, "labels": ids} for ids in found])
    store = forge_data.prepare(str(path), str(model_dir), tmp_path / "store", progress=False)
    items = Samples(store)
    plan = forge_packing.plan(items.lengths, batch_size=12, max_tokens=160, world_size=3, **items.prefixes)
    assert not any(set(rows.tolist()) & {0, 1, 2, 3} for rows in plan.micro_batches(0, 0))
    run: Any = SimpleNamespace(train=items, plan=plan, steps_from=lambda first: range(first, 1))
    assert _in_common(run) == pytest.approx(3 * 24 / (8 * 40 + 4 * 26))
