"""`forge distill --on-policy`: a teacher's divergence at the model's own completions, any division, any kill."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import forge
import forge_data
from forge.run import _memory

from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import metrics
from .test_turns import THINKING
from .verbs import run_verb


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> dict[str, Any]:
    """Settings of a run that samples at every step."""
    folder = tmp_path_factory.mktemp("on_policy")
    shutil.copytree(model_dir, folder / "teacher")
    torch.manual_seed(7)
    config = AutoModelForCausalLM.from_pretrained(model_dir).config
    config.initializer_range = 0.3
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "teacher")
    return {
        "model_path": str(model_dir),
        "teacher_path": str(folder / "teacher"),
        "data_path": str(write_rows(folder / "chats.jsonl", conversations(24))),
        "on_policy": 1.0,
        "max_new_tokens": 12,
        "max_steps": 4,
        "effective_batch_size": 5,
        "max_tokens_per_gpu": 200,
        "learning_rate": 1e-2,
        "lr_scheduler": "constant",
        "warmup_steps": 0,
    }


def samples_of(run: Path, step: int) -> list[dict[str, Any]]:
    """What was sampled for a step."""
    return [json.loads(line) for line in (run / "samples" / f"step_{step}.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in metrics(run) if "loss" in line]


def naive_sum(given: dict[str, Any], line: dict[str, Any], beta: float) -> float:
    """The summed divergence over the tokens of one sampled completion, from plain transformers' probabilities."""
    tokenizer = AutoTokenizer.from_pretrained(given["model_path"])
    prompt = tokenizer(line["prompt"], add_special_tokens=False)["input_ids"]
    ids = torch.tensor([[*prompt, *line["completion_ids"]]])
    models = [AutoModelForCausalLM.from_pretrained(given[name]).eval() for name in ("model_path", "teacher_path")]
    with torch.no_grad():
        q, p = (model(ids).logits[0, len(prompt) - 1 : -1].double().softmax(-1) for model in models)
    m = beta * p + (1 - beta) * q
    if beta in (0.0, 1.0):
        terms = (p * (p / q).log()) if beta == 0 else (q * (q / p).log())
    else:
        terms = beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()
    return terms.sum().item()


def naive_loss(given: dict[str, Any], run: Path, beta: float) -> float:
    """The mean divergence over the tokens that were sampled for the first step, one completion at a time."""
    lines = samples_of(run, 1)
    return sum(naive_sum(given, line, beta) for line in lines) / sum(len(line["completion_ids"]) for line in lines)


@pytest.mark.parametrize("beta", [0.5, pytest.param(0.0, marks=pytest.mark.lane), pytest.param(1.0, marks=pytest.mark.lane)])
def test_the_loss_is_that_of_both_models_at_what_was_sampled(beta: float, given: dict[str, Any], tmp_path: Path) -> None:
    """A step's loss is the mean divergence at its completions, behind the rows' last prompts, in any micro-batches."""
    runs = [
        forge.distill(
            **given | {"beta": beta, "max_steps": 1, "max_tokens_per_gpu": most}, ckpt_output_dir=tmp_path / str(most)
        ).output_dir
        for most in (200, 2000)
    ]
    assert samples_of(runs[0], 1) == samples_of(runs[1], 1)
    for line in samples_of(runs[0], 1):
        assert line["prompt"].endswith("<|im_start|>assistant\n")
        asked = conversations(24)[line["row"]]["messages"]
        assert asked[-2]["content"] in line["prompt"]
        assert asked[-1]["content"] not in line["prompt"]
        assert 1 <= len(line["completion_ids"]) <= 12
    expected = naive_loss(given, runs[0], beta)
    assert [losses(run)[0] for run in runs] == [pytest.approx(expected, rel=1e-5)] * 2


@pytest.mark.slow
def test_a_step_line_says_whether_the_step_was_sampled(given: dict[str, Any], tmp_path: Path) -> None:
    """With length and share of what was cut off; before the first step the log says how many steps the seed has drawn."""
    run = tmp_path / "run"
    forge.distill(**given | {"on_policy": 0.5, "logging_steps": 1, "seed": 3, "ckpt_output_dir": run})
    log = (run / "log.txt").read_text()
    steps = [line for line in log.splitlines() if re.search(r"\bstep \d/4 ", line)]
    sampled = [number for number in range(1, 5) if (run / "samples" / f"step_{number}.jsonl").is_file()]
    assert 0 < len(sampled) < 4
    assert [number for number, line in enumerate(steps, 1) if "  sampled  length " in line] == sampled
    for number in sampled:
        lines = samples_of(run, number)
        cut_off = sum(not line["finished"] for line in lines) / len(lines)
        assert f"  cut_off {cut_off:.0%}" in steps[number - 1] or not cut_off
    assert f"on_policy=0.5: {len(sampled)} of 4 steps {'is' if len(sampled) == 1 else 'are'} on completions of the" in log


@pytest.mark.lane
def test_learns_to_predict_as_the_teacher_does(given: dict[str, Any], tmp_path: Path) -> None:
    """After some steps the divergence at what is sampled is smaller."""
    more = {"max_steps": 16, "learning_rate": 3e-3, "beta": 0.0, "effective_batch_size": 12}
    run = forge.distill(**given | more, ckpt_output_dir=tmp_path / "run").output_dir
    assert losses(run)[-1] < 0.9 * losses(run)[0]


def test_a_resume_is_invisible(given: dict[str, Any], tmp_path: Path) -> None:
    """Stopped after two steps and resumed, a run samples the same completions and makes the same steps to the bit."""
    given = given | {"on_policy": 0.6, "validation_split": 0.2, "keep_full_state": True, "max_steps": 5}
    given |= {"top_p": 0.9, "top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1}
    forge.distill(**given, ckpt_output_dir=tmp_path / "whole")
    forge.distill(**given | {"max_steps": 2}, ckpt_output_dir=tmp_path / "cut")
    forge.distill(**given, ckpt_output_dir=tmp_path / "cut")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    names = [sorted(each.name for each in (tmp_path / run / "samples").iterdir()) for run in ("cut", "whole")]
    assert names[0] == names[1]
    assert 0 < len(names[0]) < 5  # a share of the steps
    for name in names[0]:
        assert (tmp_path / "cut" / "samples" / name).read_text() == (tmp_path / "whole" / "samples" / name).read_text()
    for name, other in (("on_policy", 0.7), ("top_k", 0), ("min_p", 0.0)):
        with pytest.raises(forge.SettingsError, match=name):
            forge.distill(**given | {name: other}, ckpt_output_dir=tmp_path / "cut")


def test_sampling_has_the_settings_of_the_verbs_that_sample(given: dict[str, Any], tmp_path: Path) -> None:
    """With top_k=1 each completion is the model's likeliest one, and a penalty of repeated tokens leaves none twice."""
    one = forge.distill(**given | {"top_k": 1, "max_steps": 1}, ckpt_output_dir=tmp_path / "greedy").output_dir
    tokenizer = AutoTokenizer.from_pretrained(given["model_path"])
    model = AutoModelForCausalLM.from_pretrained(given["model_path"]).eval()
    for line in samples_of(one, 1):
        ids = tokenizer(line["prompt"], add_special_tokens=False, return_tensors="pt")["input_ids"]
        made = model.generate(ids, do_sample=False, max_new_tokens=12, pad_token_id=0)
        assert made[0, ids.shape[1] :].tolist() == line["completion_ids"]
    once = forge.distill(**given | {"repetition_penalty": 1e6, "max_steps": 1}, ckpt_output_dir=tmp_path / "once").output_dir
    for line in samples_of(once, 1):
        assert len(set(line["completion_ids"])) == len(line["completion_ids"])


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.lane), "fsdp2"])
def test_two_ranks_are_one(strategy: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks sample the same completions and make the same losses as one process, held-out ones too."""
    given = given | {"on_policy": 0.6, "validation_split": 0.2, "max_steps": 3}
    forge.distill(**given, ckpt_output_dir=tmp_path / "one")
    two = {**given, "strategy": strategy, "ckpt_output_dir": str(tmp_path / "two")}
    run_on_ranks(run_verb, 2, "distill", two, joined=False)
    found = [
        [line[name] for line in metrics(tmp_path / run) for name in ("loss", "eval_loss") if name in line]
        for run in ("one", "two")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-4)
    files = [sorted((tmp_path / run / "samples").iterdir()) for run in ("one", "two")]
    assert files[0]
    assert [file.read_text() for file in files[0]] == [file.read_text() for file in files[1]]


@pytest.mark.lane
def test_is_planned(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory plan rehearses sampling, and a step on completions as long as they may be."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    run = forge.distill(**given | {"max_new_tokens": 60, "max_steps": 1}, ckpt_output_dir=tmp_path / "run").output_dir
    found = {phase["name"]: phase for phase in json.loads((run / "memory.json").read_text())["phases"]}
    assert "rollout" in found
    assert found["first steps"]["measured"] == pytest.approx(found["first steps"]["planned"], rel=0.05)
    assert found["first steps"]["measured"] <= 1.05 * found["step"]["planned"]


def test_turns_that_are_learned_apart(given: dict[str, Any], tmp_path: Path) -> None:
    """Of a row whose turns are learned one by one the last one is asked anew."""
    student = tmp_path / "student"
    shutil.copytree(given["model_path"], student)
    tokenizer = AutoTokenizer.from_pretrained(student)
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(student)
    more = {"model_path": str(student), "max_steps": 1, "effective_batch_size": 24, "max_tokens_per_gpu": 400}
    run = forge.distill(**given | more, ckpt_output_dir=tmp_path / "run").output_dir
    lines = samples_of(run, 1)
    assert len(lines) == 24
    assert all(conversations(24)[line["row"]]["messages"][-2]["content"] in line["prompt"] for line in lines)
    assert losses(run)[0] == pytest.approx(naive_loss(given | {"model_path": str(student)}, run, 0.5), rel=1e-5)


def test_rows_with_weights_and_short_prompts(given: dict[str, Any], tmp_path: Path) -> None:
    """A completion counts by the mean weight of the tokens that it replaces; a prompt may be one token."""
    rows: list[dict[str, Any]] = [{"prompt": "x", "completion": "yz"}, {"prompt": "why", "completion": "so", "weight": 0.25}]
    turns = [{"role": "user", "content": "and?"}, {"role": "assistant", "content": "yes", "weight": 3.0}]
    rows.append({"messages": [*conversations(1)[0]["messages"], *turns]})
    ids = [5, 9, 40, 41, 42, 7]
    rows.append({"input_ids": ids, "labels": [-100, 9, -100, -100, 42, 7], "weights": [0, 9, 0, 0, 0.5, 1.5]})
    more: dict[str, Any] = {"max_steps": 1, "effective_batch_size": 8, "data_path": {}}
    for number, (row, form) in enumerate(
        zip(rows, ("prompt_completion", "prompt_completion", "messages", "auto"), strict=True)
    ):
        file = write_rows(tmp_path / f"{number}.jsonl", [row, row])
        more["data_path"][str(file)] = {"data_format": form}
    run = forge.distill(**given | more, ckpt_output_dir=tmp_path / "run").output_dir
    weights = [1.0, 0.25, 3.0, 1.0]
    sums, counts = [], []
    for line in samples_of(run, 1):
        sums.append(weights[line["row"] // 2] * naive_sum(given, line, 0.5))
        counts.append(weights[line["row"] // 2] * len(line["completion_ids"]))
    assert len(sums) == 8
    assert losses(run)[0] == pytest.approx(sum(sums) / sum(counts), rel=1e-5)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"on_policy": 0}, "max_new_tokens has no effect without on_policy"),
        ({"on_policy": 0, "max_new_tokens": 256, "top_k": 5}, "top_k has no effect without on_policy"),
        ({"top_p": 0}, "top_p"),
        ({"on_policy": 1.5}, "on_policy must be from 0 to 1"),
        ({"teacher_path": None, "teacher_logprobs": "taught"}, "on_policy with teacher_logprobs"),
        ({"teacher_path": "http://127.0.0.1:9"}, "is the address of a server, which `forge teach` asks once"),
        ({"max_tokens": 100}, "max_tokens=100 with on_policy"),
        ({"optimizer": "schedule_free"}, "schedule_free with on_policy"),
        ({"train_on_turn_end": "all"}, "train_on_turn_end=all with on_policy"),
        ({"max_seq_len": 24, "on_overflow": "split"}, "on_overflow=split with on_policy"),
        ({"train_on": "all"}, r"chats\.jsonl:\d+: is learned from its beginning"),
        ({"max_tokens_per_gpu": 30}, "more than max_tokens_per_gpu=30"),
    ],
)
def test_what_is_refused(more: dict[str, Any], message: str, given: dict[str, Any], tmp_path: Path) -> None:
    """Settings without effect, teachers that read no samples, and rows without a prompt, by name."""
    with pytest.raises((forge.SettingsError, forge_data.DataError), match=message):
        forge.distill(**given | more, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
