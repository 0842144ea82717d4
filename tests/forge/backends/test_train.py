"""A training verb and its settings → the backend that runs it."""

from __future__ import annotations

from typing import Any

import pytest

import forge
import forge.hub
from forge.backends import _train

GIVEN = {"model_path": "m", "data_path": "d", "ckpt_output_dir": "o"}


def test_a_dry_run_takes_a_verb_or_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """`forge.dry_run("sft", ...)` is what a person writes first; it was an AttributeError."""
    seen: list[Any] = []
    monkeypatch.setattr(_train, "rehearse", lambda task, settings, *_, **__: seen.append((task.name, settings)))
    forge.dry_run("sft", **GIVEN)
    forge.dry_run(forge.sft, **GIVEN)
    assert seen[0] == seen[1]
    assert seen[0][0] == "sft"


@pytest.mark.parametrize("verb", ["sfx", "", None, {"model_path": "m"}, forge.hub.sft])
def test_what_is_no_verb_is_refused_by_name(verb: object) -> None:
    """One error that says what a verb is."""
    with pytest.raises(forge.SettingsError, match=r"takes a training verb first, .* or .sft., not .*Verbs: sft, osft"):
        forge.dry_run(verb, **GIVEN)
