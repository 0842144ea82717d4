"""When a run ends: after epochs, steps or learned tokens, whichever is first, or never by itself."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

import forge
from forge.cli._app import main
from forge.run._run_directory import RunDirectory

from ..lanes import ci_keeps
from .starts import metrics, untimed, weights
from .verbs import VERBS, settings_of

SAMPLING = ("ppo", "grpo", "rloo", "sdft")


@pytest.fixture
def given(model_dir: Path, chats: Path, tmp_path: Path) -> dict[str, Any]:
    """Settings of a run over 24 conversations whose end is left open; four steps are an epoch."""
    return {
        "model_path": str(model_dir),
        "data_path": str(chats),
        "ckpt_output_dir": str(tmp_path / "run"),
        "effective_batch_size": 7,
        "max_tokens_per_gpu": 256,
        "learning_rate": 1e-2,
        "lr_scheduler": "constant",
        "keep_full_state": True,
    }


class StopAfter:
    """Callback that sends this process a signal after a step, as a scheduler does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, record: dict[str, Any]) -> None:
        """Send SIGTERM after the step."""
        if record["step"] == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ci_keeps(["constant"], ["constant", "inverse_sqrt"]))
def test_a_run_without_end_is_stopped_resumed_and_given_an_end(given: dict[str, Any], schedule: str, tmp_path: Path) -> None:
    """Stopped twice, once in its second epoch, then ended: the same bits as a run whose end was known at once."""
    given |= {"lr_scheduler": schedule, "warmup_steps": 2}
    endless = given | {"num_epochs": math.inf}
    for step in (3, 6):
        with pytest.raises(forge.PreemptedError, match="the same command resumes it"):
            forge.sft(**endless, callbacks=[StopAfter(step)])
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "step 1 of a run without end" in log
    assert "without end" in log
    assert "ETA" not in log
    ended = forge.sft(**given, max_steps=9)
    whole = forge.sft(**given | {"ckpt_output_dir": str(tmp_path / "whole")}, max_steps=9)
    assert [line["epoch"] for line in metrics(ended.output_dir)] == [0, 0, 0, 0, 1, 1, 1, 1, 2]
    assert untimed(ended.output_dir) == untimed(whole.output_dir)
    assert weights(ended.output_dir) == weights(whole.output_dir)


@pytest.mark.slow
def test_a_run_without_end_is_ended_by_early_stopping(given: dict[str, Any]) -> None:
    """Patience ends it as any other, with a verified export and a report that knows no last step."""
    result = forge.sft(
        **given | {"learning_rate": 1e-12},
        num_epochs="inf",
        validation_split=0.2,
        eval_every_steps=1,
        early_stopping_patience=2,
        metric_for_best="accuracy",
    )
    assert result.steps == 2
    assert result.model_dir.exists()
    assert main(["report", str(result.output_dir)]) == 0
    assert "endless steps" in (result.output_dir / "report.html").read_text()


def test_a_schedule_that_needs_the_end_is_refused_without_one(given: dict[str, Any], tmp_path: Path) -> None:
    """By name, with the schedules that fit; a limit beside it will do."""
    wanted = r"num_epochs=inf has no end, which lr_scheduler=cosine needs to know: set lr_scheduler=constant or inverse_sqrt"
    with pytest.raises(forge.SettingsError, match=wanted):
        forge.sft(**given | {"lr_scheduler": "cosine"}, num_epochs="inf")
    assert not (tmp_path / "run").exists()
    result = forge.sft(**given | {"lr_scheduler": "cosine"}, num_epochs="inf", max_steps=5)
    assert result.steps == 5


@pytest.mark.slow
def test_held_out_rows_are_measured_at_each_epoch(given: dict[str, Any], tmp_path: Path) -> None:
    """Before the first step and at the end of each epoch, once; a run that is stopped there goes on alike."""
    given |= {"num_epochs": 3, "validation_split": 0.25, "eval_at_epoch": True, "eval_prompts": ["a b"]}
    whole = forge.sft(**given | {"ckpt_output_dir": tmp_path / "whole"}).output_dir
    assert [line["step"] for line in metrics(whole) if "eval_loss" in line] == [0, 3, 6, 9]
    assert [json.loads(line)["step"] for line in (whole / "answers.jsonl").read_text().splitlines()] == [0, 3, 6, 9]
    with pytest.raises(forge.PreemptedError):
        forge.sft(**given, callbacks=[StopAfter(6)])
    assert untimed(forge.sft(**given).output_dir) == untimed(whole)


def test_a_share_of_warmup_is_one_of_all_steps(given: dict[str, Any], tmp_path: Path) -> None:
    """Its steps rise to the highest rate; without an end it is refused, and so is another length of a run that has begun."""
    given |= {"lr_scheduler": "constant", "warmup_ratio": 0.3, "learning_rate": 1e-2}
    wanted = "num_epochs=inf has no end, and warmup_ratio=0.3 is a share of all steps: give warmup_steps"
    with pytest.raises(forge.SettingsError, match=wanted):
        forge.sft(**given, num_epochs="inf")
    result = forge.sft(**given, max_steps=5)
    assert [line["lr"] for line in metrics(result.output_dir)] == pytest.approx([5e-3, *[1e-2] * 4])
    with pytest.raises(forge.SettingsError, match="its learning rates were those of warmup_ratio=0.3 over that length"):
        forge.sft(**given, max_steps=9)


@pytest.mark.parametrize("bad", ["infinite", -1, 0, 1.5, -math.inf, math.nan, True])
def test_other_numbers_of_epochs_are_refused(given: dict[str, Any], bad: Any) -> None:
    """Only whole numbers from 1, and inf."""
    with pytest.raises(forge.SettingsError, match="num_epochs must be"):
        forge.sft(**given, num_epochs=bad)


@pytest.mark.parametrize("budget", [1, 300])
def test_tokens_end_a_run_with_the_step_that_reaches_them(given: dict[str, Any], budget: int) -> None:
    """The learned tokens of metrics.jsonl, over epochs: all steps but the last are below the budget."""
    result = forge.sft(**given | {"lr_scheduler": "linear"}, max_tokens=budget)
    learned = list(accumulate(line["loss_tokens"] for line in metrics(result.output_dir)))
    assert learned[-1] >= budget
    assert all(before < budget for before in learned[:-1])


@pytest.mark.slow
def test_the_limit_that_is_reached_first_ends_a_run(given: dict[str, Any], tmp_path: Path) -> None:
    """Each of the three in turn is the lowest."""
    for number, limits, steps in (
        (0, {"num_epochs": 1, "max_steps": 9, "max_tokens": 10**6}, 4),
        (1, {"num_epochs": 3, "max_steps": 2, "max_tokens": 10**6}, 2),
        (2, {"num_epochs": 3, "max_steps": 9, "max_tokens": 1}, 1),
    ):
        assert forge.sft(**given | {"ckpt_output_dir": str(tmp_path / str(number))}, **limits).steps == steps


@pytest.mark.slow
@pytest.mark.parametrize("verb", ci_keeps(["dpo"], [verb for verb in VERBS if verb not in SAMPLING]))
def test_every_verb_plans_by_tokens_and_without_end(
    verb: str, model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A dry run counts the steps of a budget, and has none to count without end."""
    given = settings_of(verb, model_dir, tmp_path) | {"max_steps": None, "ckpt_output_dir": str(tmp_path / "run")}
    found = forge.dry_run(getattr(forge, verb), **given, max_tokens=1)
    assert "steps: 1, 4 " in found
    found = forge.dry_run(getattr(forge, verb), **given, num_epochs="inf", lr_scheduler="constant", save_samples=3)
    assert "steps: without end, 4 " in found
    assert "exports: without end" in found
    assert "without end" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ci_keeps(["grpo"], SAMPLING))
def test_verbs_that_sample_run_without_end_and_refuse_tokens(
    verb: str, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tokens are known only once they are sampled; a refusal says so."""
    given = settings_of(verb, model_dir, tmp_path) | {"max_steps": None, "ckpt_output_dir": str(tmp_path / "run")}
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(forge.SettingsError, match="max_tokens=100 has no effect here"):
        getattr(forge, verb)(**given, max_tokens=100)
    given |= {"num_epochs": "inf", "lr_scheduler": "constant"}
    with pytest.raises(forge.PreemptedError):
        getattr(forge, verb)(**given, callbacks=[StopAfter(3)])
    assert len([line for line in metrics(tmp_path / "run") if "loss" in line]) == 3
    with RunDirectory(tmp_path / "run", resume="auto") as out:
        assert out.resuming


@pytest.mark.slow
def test_flags_and_recipes_say_without_end(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`--num-epochs inf`, and `inf` or YAML's `.inf` in a recipe; a wrong word is refused by its flag."""
    words = [word for name, value in given.items() if value is not True for word in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["sft", *words, "--num-epochs", "inf", "--dry-run"]) == 0
    for spelled in ("inf", ".inf"):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(f"num_epochs: {spelled}\n")
        assert main(["sft", str(recipe), *words, "--dry-run"]) == 0
    assert capsys.readouterr().out.count("steps: without end") == 3
    assert main(["sft", *words, "--num-epochs", "forever"]) == 2
    assert "a whole number or 'inf' is wanted, not 'forever'" in capsys.readouterr().err


def steps_of(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are of steps, as far as they are written."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [line for line in map(json.loads, (each for each in lines if each.endswith("\n"))) if "lr" in line]


def grown(process: subprocess.Popen[bytes], run: Path, number: int) -> None:
    """Wait until a run has so many steps."""
    end = time.monotonic() + 240
    while len(steps_of(run)) < number:
        assert process.poll() is None, "ended before"
        assert time.monotonic() < end, "no further step"
        time.sleep(0.05)


@pytest.mark.lane
@pytest.mark.slow
def test_a_run_without_end_on_other_ranks_and_killed(given: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks stopped by SIGTERM, one process killed, then ended: the steps of one uninterrupted process."""
    run = tmp_path / "run"
    # On a busy machine the runs make a hundred steps until they are stopped, and the order in which ranks are summed grows with
    # them: at 1e-2 to 1e-5 of the loss within 60 steps and to 2e-2 within 100, at this rate to 2e-7 within 160.
    given |= {"learning_rate": 1e-4}
    words = [word for name, value in given.items() if value is not True for word in (f"--{name.replace('_', '-')}", str(value))]
    endless = [sys.executable, "-m", "forge", "sft", *words, "--num-epochs", "inf", "--full-state-every-steps", "1"]
    with subprocess.Popen([*endless, "--nproc-per-node", "2"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as first:
        grown(first, run, 3)
        first.terminate()
        assert first.wait(timeout=480) == 75
    before = len(steps_of(run))
    with subprocess.Popen(endless, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as second:
        grown(second, run, before + 3)
        second.kill()
    last = len(steps_of(run)) + 2
    ended = forge.sft(**given, max_steps=last)
    whole = forge.sft(**given | {"ckpt_output_dir": str(tmp_path / "whole")}, max_steps=last)
    found, wanted = (steps_of(each.output_dir) for each in (ended, whole))
    assert [(line["step"], line["epoch"], line["samples"]) for line in found] == [
        (line["step"], line["epoch"], line["samples"]) for line in wanted
    ]
    assert [line["loss"] for line in found] == pytest.approx([line["loss"] for line in wanted], rel=1e-5)
