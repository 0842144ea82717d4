"""Callbacks of a launcher: a file that another process writes → calls."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from forge.trackers._callbacks import Callbacks


class Seen:
    """A callback that keeps the steps it saw."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.measured: list[int] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.steps.append(record["step"])

    def on_evaluation(self, record: dict[str, Any]) -> None:
        self.measured.append(record["step"])


def line(step: int) -> str:
    return json.dumps({"step": step, "epoch": 0, "lr": 1.0}) + "\n"


def test_a_file_is_followed_to_its_end(tmp_path: Path) -> None:
    """What is there already is not reported, nor a step that is made again; half a line waits for its other half."""
    file, seen, said = tmp_path / "metrics.jsonl", Seen(), []
    file.write_text(line(1) + line(2))
    with Callbacks([seen]).following(file, said.append):
        (tmp_path / "new").write_text(line(1))
        (tmp_path / "new").replace(file)
        with file.open("a") as handle:
            handle.write(line(2) + line(3) + line(4)[:9])
            handle.flush()
            while seen.steps != [3]:
                time.sleep(0.05)
            handle.write(line(4)[9:] + json.dumps({"step": 4, "eval_loss": 1.0}) + "\n")
    assert (seen.steps, seen.measured) == ([3, 4], [4])
    assert said == []


class Raising:
    """A callback that raises what it is given."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
        self.steps: list[int] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.steps.append(record["step"])
        raise self.error

    def on_end(self, _: object) -> None:
        self.steps.append(-1)

    def __eq__(self, _: object) -> bool:
        raise RuntimeError("it is not compared")

    __hash__ = None  # type: ignore[assignment]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), GeneratorExit(), asyncio.CancelledError()])
def test_what_a_callback_raises_ends_the_callback(error: BaseException) -> None:
    """It is reported once and not called again; the others are, and the run goes on."""
    raising, seen, said = Raising(error), Seen(), []
    callbacks = Callbacks([raising, seen])
    for step in (1, 2):
        callbacks.record({"step": step, "lr": 1.0}, said.append)
    callbacks.end(None, said.append)
    assert (raising.steps, seen.steps) == ([1], [1, 2])
    assert len(said) == 1
    assert said[0].startswith(f"WARNING: callback Raising.on_step: {type(error).__name__}")
    assert said[0].endswith("It is not called again.")


def test_an_interrupt_goes_through() -> None:
    """Ctrl-C while a callback runs is the user's, not the callback's."""
    with pytest.raises(KeyboardInterrupt):
        Callbacks([Raising(KeyboardInterrupt())]).record({"step": 1, "lr": 1.0})
