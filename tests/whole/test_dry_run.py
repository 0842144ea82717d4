"""What is known before a run costs anything: --dry-run, the memory plan, and the order of the checks."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

import forge
from forge.cli._app import main
from forge.run import _memory, _prepare

from .conftest import write_rows
from .verbs import VERBS, settings_of

if TYPE_CHECKING:
    from pathlib import Path


def words_of(settings: dict[str, Any]) -> list[str]:
    """Settings as flags."""
    return [word for name, value in settings.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture
def given(model_dir: Path, chats: Path) -> dict[str, Any]:
    """Settings of a short run."""
    return {"model_path": str(model_dir), "data_path": str(chats), "max_steps": 2, "effective_batch_size": 4}


def test_a_dry_run_says_what_would_happen(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Status 0, steps and memory and exports in words, and no directory."""
    path = tmp_path / "deep" / "run"
    assert main(["sft", *words_of(given), "--ckpt-output-dir", str(path), "--dry-run", "--for", "2xH100-80GB"]) == 0
    shown = capsys.readouterr()
    assert "steps: 2, 8 samples in all" in shown.out
    assert "exports: 1" in shown.out
    assert "memory on 2xH100-80GB, on each of 2 ranks" in shown.err
    assert "it fits" in shown.err
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_leaves_a_run_as_it_was(given: dict[str, Any], tmp_path: Path) -> None:
    """Of a finished run it says so; with other settings it refuses as the run would; no file changes."""
    forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
    assert "finished" in forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run")
    with pytest.raises(forge.ForgeError):
        forge.dry_run(forge.sft, **{**given, "learning_rate": 1e-3}, ckpt_output_dir=tmp_path / "run")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == before


@pytest.mark.slow
def test_what_does_not_fit_says_what_to_set(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The changes are tried, and each takes less than the plan."""
    found = forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run", machine="0.501GB")
    shown = " ".join(capsys.readouterr().err.split())
    assert "would not fit" in found
    assert "does NOT fit" in shown
    for setting in ("max_tokens_per_gpu=", "activation_checkpointing=true", "adapter=lora"):
        assert setting in shown


@pytest.mark.parametrize("words", ["8x", "H100", "0xH100-80GB", "0.2GB", "9" * 400 + "GB", "00xH100-80GB"])
def test_a_machine_in_other_words_is_refused(words: str, given: dict[str, Any], tmp_path: Path) -> None:
    """The message says how one is named."""
    with pytest.raises(forge.SettingsError, match="such as 8xH100-80GB"):
        forge.dry_run(forge.sft, **given, ckpt_output_dir=tmp_path / "run", machine=words)


@pytest.mark.parametrize(
    "wrong", [{"trackers": ["wandbb"]}, {"eval_prompts": [" "]}, {"eval_prompts": ["\ud800"]}, {"model_path": "no/model"}]
)
def test_a_dry_run_refuses_what_the_run_does(wrong: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    """In the same words, and neither leaves anything behind."""
    said = []
    for call in (forge.sft, partial(forge.dry_run, forge.sft)):
        with pytest.raises(Exception, match=".") as caught:
            call(**{**given, **wrong}, ckpt_output_dir=tmp_path / "run")
        assert caught.value.exit_status == 2
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert not (tmp_path / "run").exists()


def test_for_is_for_dry_runs(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without --dry-run it has no effect, and is refused."""
    assert main(["sft", *words_of(given), "--ckpt-output-dir", str(tmp_path / "run"), "--for", "24GB"]) == 2
    assert "--dry-run" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["distill", "dpo", "grpo"])
def test_each_kind_of_verb_has_a_dry_run(verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is computed, but of what is sampled, where it says why not."""
    assert verb in VERBS
    monkeypatch.syspath_prepend(tmp_path)
    settings = settings_of(verb, model_dir, tmp_path)
    plans: list[Any] = []
    plan = _prepare.plan_memory
    monkeypatch.setattr(_prepare, "plan_memory", lambda *given: plans.append(plan(*given)))
    found = forge.dry_run(getattr(forge, verb), **settings, ckpt_output_dir=tmp_path / "run")
    assert f"forge {verb} would write" in found
    if verb == "grpo":
        assert "sampled" in plans[0].refused
    else:
        assert plans[0].refused is None
        assert [phase.name for phase in plans[0].phases] == ["step", "evaluation", "saving", "export"]


def test_a_run_measures_itself(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """memory.json has the first steps as planned and as measured, within 2 percent of each other."""
    monkeypatch.setattr(_memory, "_SMALL", 0)
    forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    found = json.loads((tmp_path / "run" / "memory.json").read_text())
    phase = found["phases"][-1]
    assert phase["name"] == "first steps"
    assert math.isclose(phase["planned"], phase["measured"], rel_tol=0.02)
    assert sum(phase["parts"].values()) == phase["planned"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"adapter": "lora", "target_modules": ("q_prj",)}, "q_prj matches no linear layer"),
        ({"warmup_steps": 9}, "warmup_steps=9 is more than the 2 steps"),
        ({"moe_aux_loss": "trl"}, "moe_aux_loss=trl has no effect"),
        ({"nproc_per_node": "1", "effective_batch_size": 0}, "effective_batch_size"),
    ],
)
def test_settings_are_refused_before_a_row_is_read(
    wrong: dict[str, Any], message: str, given: dict[str, Any], tmp_path: Path
) -> None:
    """The rows are of no format; the setting is what the message is about."""
    rows = write_rows(tmp_path / "rows.jsonl", [{"nothing": 1}])
    with pytest.raises(Exception, match=message) as caught:
        forge.sft(**{**given, "data_path": str(rows), **wrong}, ckpt_output_dir=tmp_path / "run")
    assert caught.value.exit_status == 2
    assert not (tmp_path / "run").exists()


def test_a_reward_that_takes_something_else_is_refused_before_a_row_is_read(
    given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it takes, and what it will be called with."""
    (tmp_path / "odd_rewards.py").write_text("def length(texts):\n    return [len(text) for text in texts]\n")
    monkeypatch.syspath_prepend(tmp_path)
    rows = write_rows(tmp_path / "rows.jsonl", [{"nothing": 1}])
    with pytest.raises(forge.algos.RewardError, match=r"takes \(texts\)"):
        forge.grpo(**{**given, "data_path": str(rows)}, reward=("odd_rewards:length",), ckpt_output_dir=tmp_path / "run")


@pytest.mark.slow
def test_a_run_without_a_step_is_replaced(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It failed in its first forward; the same directory takes other settings."""

    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(forge.algos, "train", fails)
        with pytest.raises(forge.OutOfMemoryError):
            forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    stale = tmp_path / "run" / "answers.jsonl"
    stale.write_text('{"step": 0, "prompt": "a", "answer": "of the former run"}\n')
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")}
    assert "would write" in forge.dry_run(forge.sft, **{**given, "seed": 7}, ckpt_output_dir=tmp_path / "run")
    with pytest.raises(forge.SettingsError, match="warmup_steps=9"):
        forge.sft(**given, seed=7, warmup_steps=9, ckpt_output_dir=tmp_path / "run")
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "run").rglob("*")} == before
    result = forge.sft(**{**given, "learning_rate": 1e-3, "seed": 7}, ckpt_output_dir=tmp_path / "run")
    assert result.steps == 2
    assert "replaced" in (tmp_path / "run" / "log.txt").read_text()
    assert not stale.exists()


@pytest.mark.parametrize(
    ("error", "asked"),
    [
        (MemoryError(), "does not say|held"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes."),
            "8.00 GiB were asked",
        ),
    ],
)
def test_out_of_memory_says_where(
    error: Exception, asked: str, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Phase, figures and three settings; exit status 1."""
    from forge_algos.heads import _head

    def full(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(_head.Head, "nll", full)
    with pytest.raises(forge.OutOfMemoryError, match="forward pass|evaluation") as caught:
        forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    message = str(caught.value)
    assert caught.value.exit_status == 1
    assert any(each in message for each in asked.split("|"))
    for setting in ("max_tokens_per_gpu", "activation_checkpointing=true", "adamw_8bit"):
        assert setting in message


def test_an_export_that_cannot_be_checked_stays(given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No memory for a second copy: the model is written, the result too, and the log says what was not done."""

    def full(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for a second copy")

    monkeypatch.setattr(forge.dist, "check_export", full)
    result = forge.sft(**given, ckpt_output_dir=tmp_path / "run")
    assert (result.model_dir / "model.safetensors").is_file()
    assert (tmp_path / "run" / "result.json").is_file()
    assert "could not be compared" in (tmp_path / "run" / "log.txt").read_text()
