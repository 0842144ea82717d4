"""What a run says of what it chose."""

from __future__ import annotations

from typing import Any

import pytest

from forge.run._choices import few_steps
from forge.settings._settings import resolve
from forge.verbs._sft import SFTSettings

REQUIRED = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}


@pytest.mark.parametrize(
    ("given", "steps", "said"),
    [
        ({}, 2, True),
        ({}, 1, True),
        ({}, 10, False),
        ({}, None, False),
        ({"max_steps": 2}, 2, False),
        ({"effective_batch_size": 32}, 2, False),
        ({"num_epochs": 1}, 2, False),
    ],
)
def test_few_steps_are_remarked_on_where_nobody_chose_them(given: dict[str, Any], steps: int | None, said: bool) -> None:
    """By default 60 rows are two steps; who gave batch or length knows."""
    s = resolve(SFTSettings, ("argument", REQUIRED | given))
    if "num_epochs" not in given and "max_steps" not in given:
        s = s.resolved("num_epochs", 1, "as a run chooses it")
    found = few_steps(s, steps)
    assert (found is not None) == said
    if found is not None and steps is not None:
        assert f"{steps} step{'s' * (steps > 1)} with effective_batch_size=32 and one epoch" in found
