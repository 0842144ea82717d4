"""A training verb and its settings → the backend that runs it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import forge
import forge.hub
from forge.backends import _train
from forge.memory._target import Target

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


def test_a_dry_run_takes_the_callbacks_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same arguments are tried and run; what is no callback is refused by both."""
    monkeypatch.setattr(_train, "rehearse", lambda *_, **__: "said")

    class Watcher:
        def on_step(self, record: object) -> None: ...

    assert forge.dry_run("sft", **GIVEN, callbacks=[Watcher()]) == "said"
    with pytest.raises(forge.SettingsError, match="callbacks: int has none of the methods"):
        forge.dry_run("sft", **GIVEN, callbacks=[1])


def test_a_dry_run_that_is_ended_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A preprocessing that calls `sys.exit(0)` ended the user's program with status 0."""
    monkeypatch.setattr(_train, "get", lambda _: sys.exit(0))
    with pytest.raises(forge.RunExitError, match=r"sys\.exit\(0\) at .*test_train\.py"):
        forge.dry_run("sft", **GIVEN)


@pytest.mark.parametrize("machine", [3, "", "4xFOO"])
def test_what_is_no_machine_is_one_error(machine: object) -> None:
    """A number was an AttributeError."""
    with pytest.raises(forge.SettingsError, match=r"machine=.*: give the number of devices"):
        Target.parse(machine)  # type: ignore[arg-type]
