"""A run that is killed anywhere and resumed ends with the bits of an uninterrupted run."""

from __future__ import annotations

import random
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import forge
from forge._errors import RunInterruptedError
from forge.saving._damage import damage_of

from ..lanes import ci_keeps
from ..ranks import run_on_ranks
from .chaos import Fault, struck
from .starts import DROPOUT, RUN, damaged, final_state, sft, sft_with_signal, untimed, weights

pytestmark = pytest.mark.slow

STEPS = 12
IN_A_STEP = ("forward", "backward", "optimizer", "saving: begin", "saving: write", "saving: rename")
"""Where a kill loses the step: nothing bears its name yet."""


@pytest.fixture(scope="module")
def given(with_held_out: dict[str, Any]) -> dict[str, Any]:
    """Three epochs of four steps, with dropout, held-out data and a full state a step."""
    return with_held_out | {"eval_every_steps": 5, **RUN, **DROPOUT}


@pytest.fixture(scope="module")
def untouched(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run; background saving on, as by default."""
    run = tmp_path_factory.mktemp("untouched") / "run"
    run_on_ranks(sft, 1, {**given, "ckpt_output_dir": str(run)}, joined=False)
    return run


def killed(settings: dict[str, Any], moment: str, count: int, when: str | float) -> bool:
    """Whether the run was killed there; False if it came to its end before."""
    try:
        run_on_ranks(sft_with_signal, 1, settings, moment, count, when, joined=False)
    except RuntimeError as error:
        if "-9" not in str(error):
            raise
        return True
    return False


def saved_step(run: Path) -> int:
    """The newest full state's step; 0 where there is none."""
    names = [entry.name for entry in (run / "full_state").glob("step_*")]
    return max((int(name.removeprefix("step_")) for name in names), default=0)


def alike(run: Path, untouched: Path) -> None:
    """Raise unless two runs ended the same."""
    assert untimed(run) == untimed(untouched), "every step once, with the same loss, norm, rate and counters"
    assert weights(run) == weights(untouched), "the exported weights, bit for bit"
    assert final_state(run) == final_state(untouched), "weights and optimizer state, bit for bit"
    assert not [*run.rglob(".*")], "nothing half-written is left"


@pytest.mark.parametrize(("first", "last"), ci_keeps([(5, 5)], [(1, 4), (5, 5), (5, 8), (9, 12)]))
def test_killed_in_every_phase_of_every_step(
    first: int, last: int, given: dict[str, Any], untouched: Path, tmp_path: Path
) -> None:
    """One run is killed in each phase of each of these steps, resumed each time, and ends with the same bits.

    Each start resumes what the killed one before it left, so that a defect anywhere carries through to the end.
    """
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": str(run), "async_save": False}
    if first > 1:
        assert killed(settings, "saving: latest", first - 1, "before")
    for step in range(first, last + 1):
        for moment in IN_A_STEP:
            assert killed(settings, moment, 2 if moment in ("forward", "backward") else 1, "before")
            assert saved_step(run) == step - 1, f"killed in {moment}, step {step} is not saved"
        if step % 2:
            # A start that goes on prunes once before it makes a step: what the killed one had no time for.
            assert killed(settings, "pruning", 1 if step == 1 else 2, "before")
        else:
            assert killed(settings, "saving: rename", 1, "after")
        assert saved_step(run) == step, "a state is there as soon as it has its name"
    result = run_on_ranks(sft, 1, settings, joined=False)[0]
    assert result["steps"] == STEPS
    alike(run, untouched)


def test_killed_after_the_last_step(given: dict[str, Any], untouched: Path, tmp_path: Path) -> None:
    """Killed around the export and before the result is written: each time the run is resumed, and not finished."""
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": str(run)}
    for moment, when in (("exporting", "before"), ("exporting", "after"), ("checking", "after"), ("result", "before")):
        assert killed(settings, moment, 1, when)
        assert not (run / "result.json").exists()
    run_on_ranks(sft, 1, settings, joined=False)
    alike(run, untouched)


EXPORTS: dict[str, Any] = {
    "save_samples": 8,
    "full_state_every_steps": 0,
    "full_state_every_minutes": 0.0,
    "accelerate_full_state_at_epoch": False,
    "max_steps": 4,
    "num_epochs": None,
    "keep_best": True,
    "eval_every_steps": 2,
}
"""Exports, a better best and no full state before the last step."""


@pytest.fixture(scope="module")
def exporting(given: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The uninterrupted run of `EXPORTS`."""
    run = tmp_path_factory.mktemp("exporting") / "run"
    run_on_ranks(sft, 1, {**given, **EXPORTS, "ckpt_output_dir": str(run)}, joined=False)
    return run


def test_killed_between_an_export_and_the_first_state(given: dict[str, Any], exporting: Path, tmp_path: Path) -> None:
    """The same command goes on, each time, and what was exported is made again, damaged or not: to the same bits."""
    run = tmp_path / "run"
    settings = {**given, **EXPORTS, "ckpt_output_dir": str(run)}
    for moment, count, when in (("exporting", 1, "after"), ("checking", 2, "after"), ("exporting", 3, "before")):
        assert killed(settings, moment, count, when)
        assert not saved_step(run)
        if moment == "checking":
            # Of these nothing was recorded yet.
            for directory in run.glob("hf_format/samples_*"):
                damaged(directory / "tokenizer.json", "bit flipped", directory)
    assert [*run.glob("hf_format/samples_*")], "what was exported stays until it is made again"
    run_on_ranks(sft, 1, settings, joined=False)
    alike(run, exporting)
    assert len({file.read_bytes() for file in run.glob("hf_format/*/tokenizer.json")}) == 1
    assert not damage_of(run)


@pytest.mark.parametrize("stride", ci_keeps([37], [37, 7]))
def test_killed_at_file_operations(stride: int, given: dict[str, Any], exporting: Path, tmp_path: Path) -> None:
    """Killed at one file operation after another, with exports, a best model and hardly a state: always the same command."""
    run, count, starts = tmp_path / "run", stride, 0
    settings = {**given, **EXPORTS, "ckpt_output_dir": str(run)}
    while True:
        fault = Fault("single", "single", "kill", "file", count, 0, "lora", 0, 0)
        try:
            run_on_ranks(struck, 1, settings, tuple(fault), joined=False)
        except RuntimeError as error:
            if "-9" not in str(error):
                raise
            count, starts = count + stride, starts + 1
            continue
        break
    assert starts >= 4
    alike(run, exporting)


@pytest.mark.lane
def test_killed_at_any_moment_of_saving(given: dict[str, Any], untouched: Path, tmp_path: Path) -> None:
    """Ten kills at random moments while a state is written in the background: a whole one is always left."""
    draw, kills, starts = random.Random(5), 0, 0
    settings = {**given, "ckpt_output_dir": str(tmp_path / "run0")}
    while kills < 10:
        # A run that a slow disk or a fast processor brought to its end is done; the next kills are of another one.
        starts += 1
        assert starts <= 60, f"{kills} kills"
        if killed(settings, "saving: begin", draw.randrange(1, 3), draw.uniform(0.0, 0.03)):
            kills += 1
            continue
        alike(Path(settings["ckpt_output_dir"]), untouched)
        settings["ckpt_output_dir"] = str(tmp_path / f"run{starts}")
    run_on_ranks(sft, 1, settings, joined=False)
    alike(Path(settings["ckpt_output_dir"]), untouched)


@pytest.mark.parametrize(
    ("number", "times"), ci_keeps([(signal.SIGTERM, 1)], list(product((signal.SIGTERM, signal.SIGINT), (1, 2))))
)
def test_asked_to_stop(number: int, times: int, given: dict[str, Any], untouched: Path, tmp_path: Path) -> None:
    """A signal in any phase: the step is finished, its state saved, status 75; the same command resumes."""
    run = tmp_path / "run"
    settings = {**given, "ckpt_output_dir": str(run), "full_state_every_steps": 0, "accelerate_full_state_at_epoch": False}
    stopped = RunInterruptedError if number == signal.SIGINT else forge.PreemptedError
    for step, moment in enumerate(("optimizer", "backward", "forward") * times, start=1):
        with pytest.raises(stopped, match=rf"step_{step} holds the state to resume from") as caught:
            run_on_ranks(sft_with_signal, 1, settings, moment, 2 if moment == "backward" else 1, "before", number, joined=False)
        assert caught.value.exit_status == 75
        assert saved_step(run) == step
    run_on_ranks(sft, 1, settings, joined=False)
    assert untimed(run) == untimed(untouched)
    assert weights(run) == weights(untouched)


def test_a_finished_run_says_so(given: dict[str, Any], untouched: Path) -> None:
    """The same command once more gives the same result, at once, and changes nothing."""
    before = {file: file.stat().st_mtime_ns for file in untouched.rglob("*") if file.is_file() and "logs" not in file.parts}
    again = run_on_ranks(sft, 1, {**given, "ckpt_output_dir": str(untouched)}, joined=False)[0]
    assert again["steps"] == STEPS
    assert {
        file: file.stat().st_mtime_ns for file in untouched.rglob("*") if file.is_file() and "logs" not in file.parts
    } == before
