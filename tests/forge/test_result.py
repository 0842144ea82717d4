"""result.json: what is written comes back, and any reader of JSON can read it."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from forge._result import RunResult, read_result, write_result


def _refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


def test_figures_that_are_not_finite_are_null(tmp_path: Path) -> None:
    """An unscored reward, the loss of a skipped step: null in the file, NaN for who reads it."""
    result = RunResult(
        output_dir=tmp_path,
        model_dir=tmp_path / "hf_format" / "samples_4",
        steps=2,
        samples=4,
        loss=math.nan,
        eval_before=None,
        eval_after={"eval_reward": math.nan, "eval_length": 6.0},
        seconds=1.0,
    )
    write_result(result)
    written = json.loads((tmp_path / "result.json").read_text(), parse_constant=_refuse)
    assert written["loss"] is written["eval_after"]["eval_reward"] is None
    found = read_result(tmp_path)
    assert math.isnan(found.loss)
    assert found.eval_after == pytest.approx({"eval_reward": math.nan, "eval_length": 6.0}, nan_ok=True)
    assert (found.eval_before, found.best_value) == (None, None)
