"""`forge.sdft`: what student and teacher are asked, any adapter, ranks, a resume, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import forge
from forge._errors import SettingsError

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .conftest import conversations, write_rows
from .starts import metrics
from .verbs import run_verb, settings_of

pytestmark = pytest.mark.slow

ADAPTERS: dict[str, dict[str, Any]] = {
    "full": {},
    "initial": {"teacher": "initial"},
    "lora": {"adapter": "lora", "lora_r": 4, "teacher": "initial"},
    "lora-ema": {"adapter": "lora", "lora_r": 4},
    "osft": {"adapter": "osft", "teacher": "initial"},
    "current": {"teacher": "current", "beta": 0.0, "skip_tokens": 1, "num_generations": 2},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows."""
    return tmp_path_factory.mktemp("sdft")


def losses(run: Path) -> list[float]:
    """The loss of each step."""
    return [line["loss"] for line in metrics(run) if "loss" in line]


@pytest.mark.parametrize("way", ci_keeps(["current", "lora-ema"], list(ADAPTERS)))
def test_runs_with_every_teacher(way: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Steps, held-out figures and an export; what was sampled can be read, with what both were asked."""
    given = settings_of("sdft", model_dir, folder) | ADAPTERS[way]
    result = forge.sdft(**given, kl_base=True, ckpt_output_dir=tmp_path / "run")
    assert result.steps == 4
    assert result.eval_after is not None
    assert {"eval_loss", "eval_kl", "eval_kl_base", "eval_length", "eval_cut_off"} <= result.eval_after.keys()
    lines = [json.loads(line) for line in (tmp_path / "run" / "samples" / "step_1.jsonl").read_text().splitlines()]
    assert len(lines) == 2 * given.get("num_generations", 1)
    for line in lines:
        assert "This is an example for a response to the question:" in line["teacher_prompt"]
        assert "red." in line["teacher_prompt"]
        assert "red." not in line["prompt"]
        assert line["prompt"].endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize("way", ci_keeps(["lora-ema"], ["full", "lora-ema"]))
def test_a_resume_is_invisible(way: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Stopped after two steps and resumed, a run makes the same steps: the moving average is part of its state."""
    given = settings_of("sdft", model_dir, folder) | ADAPTERS[way] | {"teacher_rate": 0.5, "learning_rate": 1e-2}
    given |= {"lr_scheduler": "constant", "keep_full_state": True}
    forge.sdft(**given, ckpt_output_dir=tmp_path / "whole")
    forge.sdft(**{**given, "max_steps": 2}, ckpt_output_dir=tmp_path / "cut")
    forge.sdft(**given, ckpt_output_dir=tmp_path / "cut")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


@pytest.mark.parametrize("strategy", ci_keeps(["fsdp2"], ["ddp", "fsdp2"]))
def test_ranks_do_not_change_it(strategy: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Two ranks sample the same completions and make the same losses as one process, with a teacher that moves."""
    given = settings_of("sdft", model_dir, folder) | {"teacher_rate": 0.5, "learning_rate": 1e-2, "effective_batch_size": 4}
    forge.sdft(**given, ckpt_output_dir=tmp_path / "one")
    two = {**given, "strategy": strategy, "ckpt_output_dir": str(tmp_path / "two")}
    run_on_ranks(run_verb, 2, "sdft", two, joined=False)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    samples = [(tmp_path / name / "samples" / "step_1.jsonl").read_text() for name in ("one", "two")]
    assert samples[0] == samples[1]


def test_prompts_as_text(model_dir: Path, tmp_path: Path) -> None:
    """Rows of prompt and completion, both text, are asked as text; braces in them are no places."""
    rows = [{"prompt": f"the {{demonstration}} of row {k} is", "completion": "a {prompt}"} for k in range(8)]
    result = forge.sdft(
        model_path=str(model_dir),
        data_path=str(write_rows(tmp_path / "rows.jsonl", rows)),
        demonstration_template="As in '{demonstration}': {prompt}",
        max_new_tokens=4,
        max_steps=1,
        effective_batch_size=2,
        ckpt_output_dir=tmp_path / "run",
    )
    (first, _) = (json.loads(line) for line in (result.output_dir / "samples" / "step_1.jsonl").read_text().splitlines())
    assert first["prompt"] == f"the {{demonstration}} of row {first['row']} is"
    assert first["teacher_prompt"] == f"As in 'a {{prompt}}': {first['prompt']}"


@pytest.mark.parametrize(
    ("rows", "more", "message"),
    [
        ([{"prompt": "what?"}], {}, "has no demonstration"),
        (None, {"demonstration_template": "{prompt}"}, "must hold {demonstration} once"),
        (None, {"strategy": "zero3"}, "teacher=ema with strategy=zero3"),
        (None, {"teacher": "current", "teacher_rate": 0.1}, "teacher_rate=0.1 has no effect"),
    ],
)
def test_what_cannot_be_taught_is_refused(
    rows: list[dict[str, Any]] | None, more: dict[str, Any], message: str, model_dir: Path, tmp_path: Path
) -> None:
    """Rows without a demonstration, templates without its place, and settings without effect are refused by name."""
    data = write_rows(tmp_path / "rows.jsonl", [*(rows or []), *conversations(4)])
    kind = Exception if rows else SettingsError
    with pytest.raises(kind, match=message):
        forge.sdft(model_path=str(model_dir), data_path=str(data), max_steps=1, **more, ckpt_output_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()
