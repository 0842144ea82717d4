"""Conversations whose turns are tokenized apart, as a template without one form for history and answers needs it.

The turns of a row are trained on in one step, with their history in the packed row once or repeated: the losses are the same.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import forge
import forge_data
import forge_packing
from forge.memory._largest import largest_batch, largest_micro_batch
from forge.run import _prepare
from forge.tasks.items._samples import Conversations

from ..ranks import run_on_ranks
from . import reference, tiny
from .conftest import conversations, write_rows
from .starts import metrics
from .three_steps import figures
from .verbs import run_verb

# An answer stands behind an empty block where it is the last, and without it in the history.
THINKING = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SETTINGS: dict[str, Any] = {
    "max_steps": 3,
    "effective_batch_size": 4,
    "learning_rate": 1e-3,
    "lr_scheduler": "constant",
    "weight_decay": 0.0,
    "beta1": 0.9,
    "beta2": 0.95,
    "max_grad_norm": 0.5,
}


@pytest.fixture(scope="module")
def thinker(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with the template of `THINKING`."""
    directory = tmp_path_factory.mktemp("thinker") / "model"
    shutil.copytree(model_dir, directory)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def given(thinker: Path, chats: Path) -> dict[str, Any]:
    """Settings of three steps on conversations of one and two turns."""
    return {**SETTINGS, "model_path": str(thinker), "data_path": str(chats)}


def asked(rows: list[dict[str, Any]], thinker: Path) -> dict[str, list[reference.Sample]]:
    """Of each row, by its first text, what turns must learn: F minus P in the context P, from the template alone."""
    tokenizer = AutoTokenizer.from_pretrained(thinker)
    found = {}
    for row in rows:
        messages, samples = row["messages"], []
        for at in range(1, len(messages), 2):
            prompt = tokenizer.apply_chat_template(messages[:at], add_generation_prompt=True, tokenize=False)
            text = tokenizer.apply_chat_template(messages[: at + 1], tokenize=False)
            assert text.startswith(prompt)
            ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (prompt, text[len(prompt) :])]
            blanks = len(tokenizer("\n", add_special_tokens=False)["input_ids"])
            learned = [*ids[1][:-blanks], *[reference.NO_LOSS] * blanks]
            samples.append(reference.Sample(ids[0] + ids[1], [reference.NO_LOSS] * len(ids[0]) + learned))
        found[messages[0]["content"]] = samples
    return found


@pytest.mark.slow
def test_losses_are_those_of_each_turn_as_it_is_asked(given: dict[str, Any], thinker: Path, tmp_path: Path) -> None:
    """Three steps are the reference's, one turn at a time in the context of its own prompt; the log says what was shared."""
    run = tmp_path / "run"
    forge.sft(**given, ckpt_output_dir=str(run))
    rows = conversations()
    wanted = list(asked(rows, thinker).values())
    plan = forge_packing.BatchPlan.load(run / "plan" / "plan.npz")
    batches = [[turn for row in plan.samples(step).tolist() for turn in wanted[row]] for step in range(plan.num_steps)]
    recipe = reference.Recipe(1e-3, 3, lr_scheduler="constant", max_grad_norm=0.5)
    expected = reference.train(tiny.plain(str(thinker)), batches, recipe, lambda _name, _parameter: False)
    assert figures(run) == pytest.approx([step.loss for step in expected], rel=1e-5)
    assert figures(run, "grad_norm") == pytest.approx([step.grad_norm for step in expected], rel=1e-4)
    assert figures(run, "loss_tokens") == [step.loss_tokens for step in expected]
    assert figures(run, "samples") == [4, 8, 12]
    log = (run / "log.txt").read_text()
    assert "training on 24 rows as 32 samples" in log
    assert "history: computed once a row" in log


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"attention": "sdpa"},
        {"packing": "off"},
        {"max_tokens_per_gpu": 120},
        {"adapter": "prompt", "num_virtual_tokens": 2},
        pytest.param({"neftune_alpha": 5.0}, id="noise"),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_histories_repeated_or_cut_otherwise(settings: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    """Where attention, noise or adapter cannot share histories they are repeated; losses depend on neither that nor the cut."""
    other, run = tmp_path / "other", tmp_path / "run"
    forge.sft(**given, **settings, ckpt_output_dir=str(other))
    log = (other / "log.txt").read_text()
    assert ("history: computed once a row" in log) == ("max_tokens_per_gpu" in settings)
    if settings.keys() <= {"attention", "packing", "max_tokens_per_gpu"}:
        forge.sft(**given, ckpt_output_dir=str(run))
        assert figures(other) == pytest.approx(figures(run), rel=1e-5)
        assert figures(other, "grad_norm") == pytest.approx(figures(run, "grad_norm"), rel=1e-4)


@pytest.mark.slow
def test_a_row_is_held_out_whole(given: dict[str, Any], tmp_path: Path) -> None:
    """No turn of a row is trained on where another is held out; the held-out loss counts all of its turns."""
    run = tmp_path / "run"
    forge.sft(**given, validation_split=0.25, ckpt_output_dir=str(run))
    parts = forge_data.TokenStore.open(run / "data" / "train").split(0.25, seed=42)
    rows = [{part.source(at) for at in range(len(part))} for part in parts]
    assert not rows[0] & rows[1]
    assert sum(map(len, rows)) == 24
    assert [len(part.conversations) - 1 for part in parts] == [len(each) for each in rows]
    (measured, *_) = [line for line in metrics(run) if "eval_loss" in line]
    assert measured["eval_loss_tokens"] == parts[1].loss_counts.sum()


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["distill", "osft"])
def test_other_verbs(verb: str, given: dict[str, Any], thinker: Path, tmp_path: Path) -> None:
    """Verbs on the same rows train on the same turns."""
    settings = {**given, "ckpt_output_dir": str(tmp_path / "run")}
    settings |= {"teacher_path": str(thinker)} if verb == "distill" else {"unfreeze_rank_ratio": 0.5}
    getattr(forge, verb)(**settings)
    assert "history: computed once a row" in (tmp_path / "run" / "log.txt").read_text()
    assert len(figures(tmp_path / "run")) == 3


@pytest.mark.slow
def test_two_ranks_and_a_resumed_run(given: dict[str, Any], tmp_path: Path) -> None:
    """Ranks divide rows, not turns; a run that goes on after its first step is the whole one."""
    one, two, parts = (str(tmp_path / name) for name in ("one", "two", "parts"))
    forge.sft(**given, ckpt_output_dir=one)
    run_on_ranks(run_verb, 2, "sft", {**given, "strategy": "fsdp2", "ckpt_output_dir": two}, joined=False)
    assert figures(Path(two)) == pytest.approx(figures(Path(one)), rel=1e-5)
    assert figures(Path(two), "samples") == figures(Path(one), "samples")
    forge.sft(**{**given, "max_steps": 1}, full_state_every_steps=1, keep_full_state=True, ckpt_output_dir=parts)
    forge.sft(**given, full_state_every_steps=1, ckpt_output_dir=parts)
    assert figures(Path(parts)) == figures(Path(one))


@pytest.mark.slow
def test_a_system_prompt_takes_room_once(thinker: Path, tmp_path: Path) -> None:
    """Rows of conversations that begin alike are filled with what they add to it, and computed so."""
    rows = conversations(40)
    for row in rows:
        row["messages"].insert(0, {"role": "system", "content": "you know all fruit, " * 9})
    store = forge_data.prepare(str(write_rows(tmp_path / "rows.jsonl", rows)), str(thinker), tmp_path / "store", progress=False)
    items = Conversations(store)
    plan = forge_packing.plan(items.lengths, batch_size=20, max_tokens=512, world_size=2, **items.prefixes)
    plan.check()
    parts = [m for step in range(plan.num_steps) for rank in (0, 1) for m in plan.micro_batches(step, rank)]
    shared = items.sharing(share_history=True, share_prefix=True, max_tokens=512)
    assert all(len(shared.batch(part).input_ids) <= plan.places(part) <= 512 for part in parts)
    assert len(parts) < 0.7 * sum(2 * len(plan.alone().micro_batches(step)) for step in range(plan.num_steps))


def many_turns(folder: Path, turns: int = 14) -> str:
    """A row of many turns, and two long ones of one turn."""
    many = [("user", "why?"), ("assistant", "sun")] * turns
    long = [
        [("user", f"{at} what colour has the fruit? " * (24 if turns > 10 else 40)), ("assistant", "red")] for at in range(2)
    ]
    rows = [{"messages": [{"role": role, "content": content} for role, content in each]} for each in (many, *long)]
    return str(write_rows(folder / "many.jsonl", rows))


def test_the_memory_plan_rehearses_the_row_that_repeats_most(thinker: Path, tmp_path: Path) -> None:
    """Fourteen turns have fewer tokens than two long rows, and more keys; where history is repeated, most tokens."""
    path = many_turns(tmp_path)
    items = Conversations(forge_data.prepare(path, str(thinker), tmp_path / "store", progress=False))
    plan = forge_packing.plan(items.lengths, batch_size=3, max_tokens=int(items.lengths[1:].sum()), shuffle=False)
    worst, _ = largest_micro_batch(plan)
    assert worst.tolist() == [1, 2]
    shared = largest_batch(plan, items.sharing(share_history=True, share_prefix=True), worst)
    assert len(shared.kv_rows) == items.unshared[0]
    assert len(largest_batch(plan, items, worst).input_ids) == items.unshared[0]


@pytest.mark.slow
def test_the_memory_plan_of_held_out_rows_that_repeat(
    thinker: Path, chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation of a row whose turns repeat their history takes more than a full micro-batch."""
    plans: list[Any] = []
    write = _prepare.write_plan
    monkeypatch.setattr(_prepare, "write_plan", lambda plan, *given, **how: plans.append(plan) or write(plan, *given, **how))
    settings = {**SETTINGS, "model_path": str(thinker), "data_path": str(chats), "attention": "sdpa", "lint": "off"}
    for turns in (2, 10):
        held_out = many_turns(tmp_path, turns)
        forge.dry_run(forge.sft, **settings, max_tokens_per_gpu=800, eval_data_path=held_out, ckpt_output_dir=tmp_path / "run")
    once, repeated = (next(each.planned for each in plan.phases if each.name == "evaluation") for plan in plans)
    assert repeated > 1.3 * once
