"""The best model is that of the best evaluation, over every resume; references are checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import forge
from forge.saving._best import Best
from forge.tasks._task import Evaluation

from ..lanes import ci_keeps
from .starts import metrics
from .verbs import settings_of, teacher

pytestmark = pytest.mark.slow

STATES = {"lr_scheduler": "constant", "full_state_every_steps": 1, "keep_full_state": True}
LONGER = {**STATES, "eval_every_steps": 1, "keep_best": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of rows."""
    return tmp_path_factory.mktemp("verbs")


def weights(directory: Path) -> bytes:
    """The weights of one export."""
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("metric", "other"), ci_keeps([("margin", "chosen_logp")], [("margin", "chosen_logp"), ("loss", "accuracy")])
)
def test_best_stays_true_when_a_run_goes_on(metric: str, other: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Resumed with another metric, a run measures every step once and keeps the weights of the new best."""
    given = settings_of("dpo", model_dir, folder) | LONGER | {"ckpt_output_dir": tmp_path / "run"}
    forge.dpo(**{**given, "max_steps": 3, "metric_for_best": metric})
    result = forge.dpo(**{**given, "max_steps": 6, "metric_for_best": other, "save_samples": 1})
    lines = [line for line in metrics(tmp_path / "run") if f"eval_{other}" in line]
    assert [line["step"] for line in lines] == list(range(7))
    later = {line["step"]: line[f"eval_{other}"] for line in lines if line["step"] > 3}
    best = min(later, key=lambda step: later[step] if other == "loss" else -later[step])
    assert result.best_step == best
    assert result.best_value == later[best]
    assert result.best_dir is not None
    (samples,) = (line["samples"] for line in metrics(tmp_path / "run") if "samples" in line and line["step"] == best)
    assert weights(result.best_dir) == weights(tmp_path / "run" / "hf_format" / f"samples_{samples}")


def test_a_best_of_later_steps_goes_with_them(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Resumed from a state before its best step, a run does not keep that step's export."""
    given = settings_of("dpo", model_dir, folder) | LONGER | {"ckpt_output_dir": tmp_path / "run", "keep_last_n": 9}
    forge.dpo(**{**given, "max_steps": 4})
    (tmp_path / "run" / "result.json").unlink()
    early = str(tmp_path / "run" / "full_state" / "step_1")
    result = forge.dpo(**{**given, "max_steps": 2, "resume": early})
    mark = json.loads((tmp_path / "run" / "hf_format" / "best.json").read_text())
    assert mark["step"] == result.best_step == 2
    assert weights(result.best_dir or Path()) == weights(result.model_dir)


@pytest.mark.lane
def test_a_run_that_is_made_shorter_is_measured_at_its_end(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A state that becomes the last of a shorter run is evaluated before it is exported."""
    given = settings_of("dpo", model_dir, folder) | STATES | {"keep_last_n": 9}
    forge.dpo(**{**given, "max_steps": 3}, ckpt_output_dir=tmp_path / "run")
    (tmp_path / "run" / "result.json").unlink()
    early = str(tmp_path / "run" / "full_state" / "step_2")
    result = forge.dpo(**{**given, "max_steps": 2, "resume": early}, ckpt_output_dir=tmp_path / "run")
    assert result.eval_after is not None
    assert result.eval_after == forge.dpo(**{**given, "max_steps": 2}, ckpt_output_dir=tmp_path / "other").eval_after


def test_directions() -> None:
    """Losses and figures of rejected answers are best low, all others high; NaN is never better."""

    def after(metric: str, *values: float) -> Best:
        best = Best()
        for step, value in enumerate(values):
            loss = {"loss": value} if metric == "loss" else {"loss": 0.0, "figures": {metric: value}}
            best = best.after(Evaluation(**{"count": 1, "unit": "pairs", "figures": {}, **loss}), step, metric)
        return best

    for metric in ("loss", "nll", "kl", "rejected_reward", "rejected_logp"):
        assert after(metric, 3.0, 1.0, 2.0) == Best(metric=metric, value=1.0, step=1, waited=1)
    for metric in ("accuracy", "reward", "margin", "chosen_logp"):
        assert after(metric, 1.0, 3.0, float("nan"), 2.0) == Best(metric=metric, value=3.0, step=1, waited=2)


def test_nothing_better_than_before_training(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Where no step beats the initial model, no best is kept, and early stopping ends the run."""
    given = settings_of("sft", model_dir, folder) | LONGER | {"learning_rate": 1.0}
    result = forge.sft(**given, early_stopping_patience=2, ckpt_output_dir=tmp_path / "run")
    assert (result.best_step, result.steps, result.best_dir) == (0, 2, None)


@pytest.mark.parametrize("damage", ci_keeps(["reversed"], ["reversed", "short", "nan"]))
def test_changed_references_are_not_trained_on(damage: str, model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """Altered reference log-probabilities are computed anew, whatever their metadata."""
    given = settings_of("dpo", model_dir, folder) | STATES
    runs = []
    for name in ("whole", "damaged"):
        run = tmp_path / name
        forge.dpo(**{**given, "max_steps": 2}, ckpt_output_dir=run)
        if name == "damaged":
            file = run / "data" / "train.reference.safetensors"
            from safetensors import safe_open

            with safe_open(file, framework="numpy") as opened:
                about = opened.metadata()
            change = {"reversed": lambda v: v[::-1].copy(), "short": lambda v: v[:5].copy(), "nan": lambda v: v * np.nan}
            save_file({k: change[damage](v) for k, v in load_file(file).items()}, file, metadata=about)
        forge.dpo(**{**given, "max_steps": 4}, ckpt_output_dir=run)
        runs.append([line["loss"] for line in metrics(run) if "loss" in line])
    assert runs[0] == runs[1]


def test_a_reference_with_other_tokens_is_refused(model_dir: Path, folder: Path, tmp_path: Path) -> None:
    """A second model with another vocabulary is refused by setting, and so is a path that is no model."""
    other = teacher(model_dir, tmp_path)
    file = other / "tokenizer.json"
    text = json.loads(file.read_text())
    vocabulary = text["model"]["vocab"]
    first, second = (token for token in vocabulary if len(token) == 1 and token in "ab")
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(text))
    for verb, name in (("dpo", "reference_path"), ("distill", "teacher_path")):
        given: dict[str, Any] = {**settings_of(verb, model_dir, folder), "ckpt_output_dir": tmp_path / "run"}
        with pytest.raises(forge.SettingsError, match=f"{name} .*: its tokenizer gives other ids"):
            getattr(forge, verb)(**{**given, name: str(other)})
        with pytest.raises(forge.dist.ModelError, match=f"{name} .* is a file"):
            getattr(forge, verb)(**{**given, name: str(file)})
    assert not (tmp_path / "run").exists()
