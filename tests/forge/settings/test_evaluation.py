"""When held-out rows are measured: after numbers of steps, or after shares of the run."""

from __future__ import annotations

import pytest

from forge._errors import SettingsError
from forge.settings._settings import EvaluationSettings, resolve
from forge.verbs._sft import SFTSettings


@pytest.mark.parametrize(
    ("every", "num_steps", "between"),
    [(0, 30, 0), (7, 30, 7), (7, None, 7), (0.1, 30, 3), (0.1, 25, 3), (1 / 12, 120, 10), (0.01, 5, 1), (0.0, 30, 0)],
)
def test_a_share_of_the_run_is_a_number_of_steps(every: float, num_steps: int | None, between: int) -> None:
    """It is rounded up, as transformers has it, and never none."""
    assert EvaluationSettings(eval_every_steps=every).steps_between(num_steps) == between


@pytest.mark.parametrize("every", [-1, 1.0, 1.5, float("nan"), float("inf")])
def test_what_is_neither_is_refused(every: float) -> None:
    """Steps are whole, and a share is below 1."""
    with pytest.raises(ValueError, match="a share of the run below 1"):
        EvaluationSettings(eval_every_steps=every)


def test_a_run_without_end_has_no_shares() -> None:
    """Whoever asks for them gives an end, or steps."""
    given = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o", "validation_split": 0.5, "num_epochs": "inf"}
    given |= {"lr_scheduler": "constant", "eval_every_steps": 0.25}
    with pytest.raises(SettingsError, match=r"num_epochs=inf has no end, and eval_every_steps=0\.25"):
        resolve(SFTSettings, ("argument", given))
    assert resolve(SFTSettings, ("argument", {**given, "max_steps": 8})).evaluation.eval_every_steps == 0.25
