"""Callbacks of a launcher: a file that another process writes → calls."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from forge.trackers._callbacks import Callbacks


class Seen:
    """A callback that keeps the steps it saw."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.measured: list[int] = []

    def on_step(self, record: dict[str, Any]) -> None:
        self.steps.append(record["step"])
        raise ValueError("no")

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
    assert said == ["WARNING: callback Seen.on_step: ValueError: no"]
