"""For every verb of forge: rows that it takes, and settings of a short run."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ..ranks import run_on_ranks
from .conftest import FRUITS, conversations, write_rows
from .starts import metrics

SHORT: dict[str, Any] = {
    "max_steps": 4,
    "effective_batch_size": 4,
    "max_tokens_per_gpu": 512,
    "learning_rate": 2e-3,
    "validation_split": 0.25,
    "logging_steps": 100,
}
ONLINE: dict[str, Any] = {"reward": ("forge_test_rewards:short",), "max_new_tokens": 6, "effective_batch_size": 2}
VERBS: dict[str, dict[str, Any]] = {
    "sft": {},
    "osft": {},
    "pretrain": {"block_size": 24},
    "distill": {"teacher_path": "TEACHER"},
    "sdft": {"max_new_tokens": 6, "effective_batch_size": 2},
    "dpo": {},
    "orpo": {},
    "simpo": {},
    "kto": {},
    "reward": {},
    "classify": {},
    "embed": {},
    "ppo": {**ONLINE, "num_iterations": 2},
    "grpo": {**ONLINE, "num_generations": 3, "num_iterations": 2, "kl_weight": 0.05},
    "rloo": {**ONLINE, "num_generations": 2},
}
"""What each is given beside `SHORT`, its model and its rows."""

KINDS = {
    **dict.fromkeys(("sft", "osft", "distill", "sdft"), "chats"),
    **dict.fromkeys(("dpo", "orpo", "simpo", "reward"), "pairs"),
    **dict.fromkeys(("ppo", "grpo", "rloo"), "prompts"),
    "pretrain": "documents",
    "kto": "answers",
    "classify": "labelled",
    "embed": "texts",
}


def rows_of(kind: str, number: int = 24) -> list[dict[str, Any]]:
    """Ragged rows of one kind, where the better answer names the colour red."""
    rows: list[dict[str, Any]] = []
    for index in range(number):
        fruit = FRUITS[index % len(FRUITS)]
        prompt = [{"role": "user", "content": f"what colour has the {fruit} number {index}?"}]
        good = [{"role": "assistant", "content": f"the {fruit} is " + "very " * (index % 4) + "red."}]
        bad = [{"role": "assistant", "content": f"the {fruit} likes " + "the sun and " * (index % 3) + "the rain."}]
        if kind == "pairs":
            rows.append({"prompt": prompt, "chosen": good, "rejected": bad})
        elif kind == "answers":
            rows.append({"prompt": prompt, "completion": bad if index % 2 else good, "label": not index % 2})
        elif kind == "prompts":
            asked = [{"role": "user", "content": prompt[0]["content"] + " please" * (index % 3)}]
            rows.append({"prompt": asked, "fruit": fruit})
        elif kind == "labelled":
            rows.append({"text": (bad if index % 2 else good)[0]["content"], "label": "weather" if index % 2 else "colour"})
        elif kind == "texts":
            rows.append({"query": prompt[0]["content"], "positive": good[0]["content"], "negative": bad[0]["content"]})
        elif kind == "documents":
            rows.append({"text": f"number {index}: {good[0]['content']} " * (1 + index % 3)})
    return rows or conversations(number)


def settings_of(verb: str, model_dir: Path, folder: Path) -> dict[str, Any]:
    """Settings of a short run, without its output directory; rows and rewards are written to `folder`."""
    kind = KINDS[verb]
    data = folder / f"{kind}.jsonl"
    if not data.exists():
        write_rows(data, rows_of(kind))
    (folder / "forge_test_rewards.py").write_text(
        '"""Rewards of the tests."""\n\n\n'
        "def short(prompts, completions, fruit, **_):\n"
        "    assert len(fruit) == len(completions)\n"
        "    return [-len(text(c)) / 10 for c in completions]\n\n\n"
        "def text(completion):\n"
        '    return completion if isinstance(completion, str) else completion[-1]["content"]\n'
    )
    own = {name: str(teacher(model_dir, folder)) if value == "TEACHER" else value for name, value in VERBS[verb].items()}
    return {"model_path": str(model_dir), "data_path": str(data), **SHORT, **own}


def teacher(model_dir: Path, folder: Path) -> Path:
    """A model of the same vocabulary that predicts otherwise, written to `folder`."""
    if not (folder / "teacher").exists():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        model = AutoModelForCausalLM.from_pretrained(model_dir)
        with torch.no_grad():
            model.get_input_embeddings().weight.mul_(3)
        model.save_pretrained(folder / "teacher")
        AutoTokenizer.from_pretrained(model_dir).save_pretrained(folder / "teacher")
    return folder / "teacher"


def run_verb(verb: str, settings: dict[str, Any], path: str | None = None) -> dict[str, Any]:
    """Run a verb, and return its result as JSON; `path` is the folder of its modules."""
    import sys

    import forge

    if path is not None:
        sys.path.insert(0, path)
    # Another test's module of this name may be loaded, and this one's must not stay.
    sys.modules.pop("forge_test_rewards", None)
    try:
        # A finished run keeps its last states, by which runs are compared.
        result = getattr(forge, verb)(**{"keep_full_state": True, **settings})
    finally:
        sys.modules.pop("forge_test_rewards", None)
        if path is not None:
            sys.path.remove(path)
    return {"steps": result.steps, "loss": result.loss, "model_dir": str(result.model_dir), "eval_after": result.eval_after}


def uninterrupted(given: Callable[..., dict[str, Any]], folder: Path, roots: Any) -> Callable[..., Path]:
    """Return a function: verb and settings → the directory of their run in one process, made once.

    `given` makes all settings of a run of these, `roots` is pytest's factory of temporary directories, `folder` has the rows.
    """

    @cache
    def run(verb: str, **more: Any) -> Path:
        where = roots.mktemp(verb) / "run"
        settings = {**given(verb, **more), "ckpt_output_dir": str(where)}
        run_on_ranks(run_verb, 1, verb, settings, str(folder), joined=False)
        return where

    return run


def run_verb_killed(verb: str, settings: dict[str, Any], path: str, step: int) -> None:
    """Run a verb until the state of a step was saved, and kill this process before the next step."""
    from forge.saving._full_state import FullStates

    original = FullStates.save

    def save(self: FullStates, strategy: Any, model: Any, optimizer: Any, scheduler: Any, at: Any, *, wait: bool) -> None:
        original(self, strategy, model, optimizer, scheduler, at, wait=True)
        if at.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    FullStates.save = save  # ty: ignore
    run_verb(verb, settings, path)


def assert_two_ranks_as_one(
    verb: str, settings: dict[str, Any], folder: Path, names: Sequence[str], absolute: float | None = None
) -> None:
    """Train on one rank and, by the settings' strategy, on two; figures of all steps are equal, within 1e-5 or `absolute`."""
    for ranks in (1, 2):
        run = settings | {"ckpt_output_dir": str(folder / str(ranks))}
        run_on_ranks(run_verb, ranks, verb, run if ranks == 2 else run | {"strategy": "auto"}, joined=False)
    one, two = metrics(folder / "1"), metrics(folder / "2")
    for name in names:
        found = [[line[name] for line in lines if name in line] for lines in (two, one)]
        assert found[0], name
        assert found[0] == pytest.approx(found[1], rel=1e-4 if name == "grad_norm" else 1e-5, abs=absolute), name
