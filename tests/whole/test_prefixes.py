"""Samples that begin alike, with one system prompt for instance: it is computed once a micro-batch, and losses are the same."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig

import forge
import forge_algos
import forge_data
import forge_packing
from forge.memory._largest import largest_batch, largest_micro_batch
from forge.tasks._sharing import Sharing
from forge.tasks.items._samples import Samples
from forge.verbs._sft import _in_common

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from . import tiny
from .conftest import write_rows
from .starts import metrics, untimed, weights
from .three_steps import SETTINGS, figures, oracle
from .verbs import KINDS, rows_of, run_verb, run_verb_killed, settings_of

if TYPE_CHECKING:
    from collections.abc import Callable

TOOLS = tiny.sample(24, 40, slice(0, None)).input_ids
"""What most samples begin with."""


CONTEXT = {"cp_size": 2}
"""Ranks that share each row."""


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


FAMILIES = ["mistral-window", "gemma3-window", "gpt-oss: sinks, and a mask made without positions", "gemma2: capped scores"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ci_keeps(["gemma3-window"], FAMILIES))
def test_models_that_look_at_positions_otherwise(
    name: str, made: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path
) -> None:
    """A sliding window that ends within the prefix, sinks and capped scores: losses are those of each sample alone."""
    run, model = tmp_path / "run", str(saved(name))
    forge.sft(**{**made, "model_path": model}, ckpt_output_dir=str(run))
    assert "prefixes: computed once a micro-batch" in log(run)
    expected = oracle(run, tiny.plain(model))
    assert figures(run) == pytest.approx([step.loss for step in expected], rel=1e-6)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-5)


@pytest.mark.slow
def test_routers_see_a_prefix_once_for_each_sample(
    made: dict[str, Any], saved: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The balance of experts counts a shared token as often as samples have it: figures are those without sharing."""
    made = {**made, "model_path": str(saved(FAMILIES[2])), "moe_aux_loss": "global"}
    runs = [tmp_path / "shared", tmp_path / "alone"]
    forge.sft(**made, ckpt_output_dir=str(runs[0]))
    monkeypatch.setattr(forge_packing.collating._groups, "LEAST_PREFIX", 1_000_000)
    monkeypatch.setattr(Samples, "prefixes", {})
    forge.sft(**made, ckpt_output_dir=str(runs[1]))
    for name, near in (("aux_loss", 1e-6), ("loss", 1e-6), ("grad_norm", 1e-5)):
        assert figures(runs[0], name) == pytest.approx(figures(runs[1], name), rel=near)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"adapter": "lora", "lora_dropout": 0.1}, ": base_model"),
        ({"neftune_alpha": 5.0}, ": neftune_alpha=5 draws noise for each sample"),
        ({"effective_batch_size": 1}, None),
        ({"packing": "off"}, None),
        ({"adapter": "prompt"}, None),
    ],
    ids=["dropout", "noise", "single samples", "documents alone", "virtual tokens"],
)
def test_where_each_computes_its_own(
    settings: dict[str, Any], reason: str | None, made: dict[str, Any], tmp_path: Path
) -> None:
    """What is drawn at random is drawn for each sample; a run with nothing in common does not mention prefixes.

    Nor does one whose samples are lines by themselves, where nothing could be shared.
    """
    run = tmp_path / "run"
    forge.sft(**{**made, **settings, "max_steps": 1}, ckpt_output_dir=str(run))
    assert (reason in log(run)) if reason else ("prefixes:" not in log(run))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    ci_keeps(
        [{"activation_checkpointing": "full", "adapter": "dora"}, {"dtype": "bfloat16", "weights": "bfloat16"}],
        [
            {"activation_checkpointing": "full", "adapter": "dora"},
            {"dtype": "bfloat16", "weights": "bfloat16"},
            {"activation_checkpointing": "selective", "compile": "blocks"},
            {"adapter": "qlora"},
            {"adapter": "osft"},
            {"adapter": "adapter_prompt"},
        ],
    ),
    ids=lambda settings: " ".join(settings.values()),
)
def test_with_other_settings(
    settings: dict[str, Any], made: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, of held-out rows too, gradients and counts are those of the same run that shares nothing."""
    made = {**made, **settings, "validation_split": 0.25}
    runs = [tmp_path / "shared", tmp_path / "alone"]
    forge.sft(**made, ckpt_output_dir=str(runs[0]))
    assert "prefixes: computed once a micro-batch" in log(runs[0])
    monkeypatch.setattr(forge_packing.collating._groups, "LEAST_PREFIX", 1_000_000)
    monkeypatch.setattr(Samples, "prefixes", {})
    forge.sft(**made, ckpt_output_dir=str(runs[1]))
    assert "prefixes:" not in log(runs[1])
    rounding = "weights" in settings
    for name, near in (("loss", 1e-6), ("grad_norm", 1e-5), ("eval_loss", 1e-6)):
        found = [[line[name] for line in metrics(run) if name in line] for run in runs]
        assert found[0] == pytest.approx(found[1], rel=1e-2 if rounding else near)
    for name in ("samples", "tokens", "loss_tokens"):
        assert figures(runs[0], name) == figures(runs[1], name)


@pytest.mark.slow
@pytest.mark.parametrize("settings", ci_keeps([{}, CONTEXT], [{}, CONTEXT, {"tp_size": 2}, {"strategy": "zero3"}]))
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
    noun = {"distill": "", "kto": "an answer, what answers"}.get(verb, "a pair, what pairs")
    words = f"prompts: computed once {noun} begin with alike" if noun else "prefixes: computed"
    assert f"{words} once a micro-batch" in log(runs[0])


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
    assert (None if plan.prefix_tokens is None else plan.prefix_tokens.tolist()) == ([24] if shares else None)
    planned = [plan.places(m) for step in range(plan.num_steps) for m in plan.micro_batches(step)]
    sizes = [len(row.input_ids) for row in rows]
    assert max(sizes) <= 64
    assert not Counter(planned) - Counter(sizes)
    assert ("micro-batches are planned anew" in log(run)) is not shares
    assert (len(planned) < sum(len(plan.alone().micro_batches(step)) for step in range(plan.num_steps))) is shares


@pytest.mark.slow
def test_prefixes_of_later_rows_are_seen(model_dir: Path, tmp_path: Path) -> None:
    """A set in the order of its sources begins with rows that have nothing in common."""
    own = [tiny.sample(30, 200 + at) for at in range(40)]
    made = [{"input_ids": (TOOLS if at >= 20 else []) + each.input_ids, "labels": None} for at, each in enumerate(own)]
    for row in made:
        row["labels"] = row["input_ids"]
    path = write_rows(tmp_path / "rows.jsonl", made)
    store = forge_data.prepare(str(path), str(model_dir), tmp_path / "store", progress=False)
    items = Samples(store)
    plan = forge_packing.plan(items.lengths, batch_size=2, max_tokens=128, shuffle=False, **items.prefixes)
    run: Any = SimpleNamespace(train=items, plan=plan, steps_from=lambda first: iter(range(first, plan.num_steps)))
    assert 0 < _in_common(run) < 0.5
    run.plan = plan.alone()
    assert _in_common(run) == 0


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
    assert len(largest_batch(plan, items, worst).input_ids) == 160
    assert len(largest_batch(plan, items.sharing(share_prefix=False), worst).input_ids) == 168


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["grpo"], ["grpo", "rloo", "ppo", "sdft"]))
def test_sampled_completions(verb: str, model_dir: Path, tmp_path: Path) -> None:
    """Different prompts behind one system prompt: the same completions, losses and counts; it is computed once a row."""
    rows = rows_of(KINDS[verb], 8)
    for row in rows:
        row["messages" if verb == "sdft" else "prompt"].insert(0, {"role": "system", "content": "you know all fruit, " * 3})
    settings = settings_of(verb, model_dir, tmp_path) | {"data_path": str(write_rows(tmp_path / "rows.jsonl", rows))}
    settings |= {"max_steps": 2, "effective_batch_size": 4, "validation_split": 0.5}
    runs = [tmp_path / "shared", tmp_path / "alone"]
    computed = []
    for run, more in zip(runs, [{}, {"attention": "sdpa"}], strict=True):
        made = {**settings, **more, "ckpt_output_dir": str(run)}
        computed.append(computed_tokens(lambda made=made: run_verb(verb, made, str(tmp_path))))
    once = "group" if verb != "sdft" else "completion"
    assert f"prompts: computed once a {once}, what prompts begin with alike once a micro-batch" in log(runs[0])
    assert "prompts: computed once a completion: attention 'sdpa' does not know kv_rows" in log(runs[1])
    # Without, 0.37, 0.53, 1 and 1 would be computed: a group's prompt once, or every prompt.
    assert computed[0] < {"grpo": 0.2, "rloo": 0.3, "ppo": 0.5, "sdft": 0.7}[verb] * computed[1]
    # What SDFT learns is a KL near 0, what is left of log-probabilities near ln V: each is off by an ulp of those in float32, a
    # token's KL was by 6e-7 from float64's, whose means were the same on both sides.
    near = float(np.spacing(np.float32(np.log(AutoConfig.from_pretrained(model_dir).vocab_size)))) if verb == "sdft" else 1e-7
    for name in ("loss", "grad_norm"):
        assert figures(runs[0], name) == pytest.approx(figures(runs[1], name), rel=1e-5, abs=near)
    assert figures(runs[0], "samples") == figures(runs[1], "samples")


def of_two_systems(verb: str, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Settings of steps on prompts of which every other one has another system message."""
    rows = rows_of(KINDS[verb], 16)
    for at, row in enumerate(rows):
        system = ["you know all fruit, " * 8, "the sun and the rain " * 8][at % 2]
        row["messages" if verb == "sdft" else "prompt"].insert(0, {"role": "system", "content": system})
    given = settings_of(verb, model_dir, folder) | {"data_path": str(write_rows(folder / "rows.jsonl", rows))}
    given |= {"max_steps": 4, "effective_batch_size": 8, "validation_split": 0, "max_tokens_per_gpu": 400}
    given.pop("eval_every_steps", None)
    return {**given, "full_state_every_steps": 3, **({"kl_base": False} if verb == "sdft" else {})}


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["ppo"], ["grpo", "rloo", "ppo", "sdft"]))
def test_completions_behind_one_system_prompt_are_put_together(
    verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fewer tokens are computed than in rows of neighbours, and losses are the same."""
    given, runs = of_two_systems(verb, model_dir, tmp_path), {}

    def run(name: str, **more: Any) -> int:
        runs[name] = tmp_path / name
        return computed_tokens(lambda: run_verb(verb, {**given, **more, "ckpt_output_dir": str(runs[name])}, str(tmp_path)))

    planned, alone = run("planned"), run("alone", attention="sdpa")
    of_rows = Sharing.of_rows.fget
    assert of_rows is not None
    monkeypatch.setattr(Sharing, "of_rows", property(lambda self: {**of_rows(self), "least_prefix": None}))
    monkeypatch.setattr(Sharing, "beginnings", lambda *_: [])
    neighbours = run("neighbours")
    print(verb, planned, neighbours, alone)
    assert planned < (0.9 if verb == "sdft" else 0.8) * neighbours
    assert neighbours <= alone
    for name in ("neighbours", "alone"):
        for figure in ("loss", "grad_norm"):
            assert figures(runs["planned"], figure) == pytest.approx(figures(runs[name], figure), rel=1e-5, abs=1e-6), name
        assert figures(runs["planned"], "samples") == figures(runs[name], "samples")


@pytest.mark.lane
@pytest.mark.slow
@pytest.mark.parametrize("verb", ["grpo", "rloo", "ppo", "sdft"])
def test_completions_that_are_put_together_are_the_same_anywhere(verb: str, model_dir: Path, tmp_path: Path) -> None:
    """On two ranks with the same losses; killed after a step and resumed to the same bits."""
    given = of_two_systems(verb, model_dir, tmp_path)
    whole, divided, killed = ({**given, "ckpt_output_dir": str(tmp_path / name)} for name in ("whole", "divided", "killed"))
    run_on_ranks(run_verb, 1, verb, whole, str(tmp_path), joined=False)
    run_on_ranks(run_verb, 2, verb, {**divided, "strategy": "ddp"}, str(tmp_path), joined=False)
    for figure, near in (("loss", 1e-5), ("grad_norm", 1e-4), ("samples", 0)):
        one, other = (figures(tmp_path / name, figure) for name in ("whole", "divided"))
        assert one == pytest.approx(other, rel=near, abs=1e-6)
    with pytest.raises(RuntimeError, match="status -9"):
        run_on_ranks(run_verb_killed, 1, verb, killed, str(tmp_path), 3, joined=False)
    run_on_ranks(run_verb, 1, verb, killed, str(tmp_path), joined=False)
    assert "resuming after step 3" in log(tmp_path / "killed")
    assert untimed(tmp_path / "killed") == untimed(tmp_path / "whole")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["grpo"], ["grpo", "sdft"]))
def test_a_reference_that_shares_nothing(verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the copy of the initial model, in a dtype of its own, was found to share no prompts, no row has shared ones."""
    plainly = forge_algos.isolation._prompt_sharing._answer

    def answer(model: Any, *more: Any) -> Any:
        trained = any(weight.requires_grad for weight in model.parameters())
        return plainly(model, *more) if trained else (False, "it is a test")

    monkeypatch.setattr(forge_algos.isolation._prompt_sharing, "_answer", answer)
    settings = settings_of(verb, model_dir, tmp_path) | {"max_steps": 1, "validation_split": 0}
    settings |= {"teacher": "initial"} if verb == "sdft" else {}
    run_verb(verb, {**settings, "ckpt_output_dir": str(tmp_path / "run")}, str(tmp_path))
    assert "prompts: computed once a completion: it is a test" in log(tmp_path / "run")


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
