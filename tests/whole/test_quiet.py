"""`quiet`: warnings and how a run ends on the terminal, and every line in the run's log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import forge

from .conftest import conversations, write_rows
from .verbs import SHORT


@pytest.mark.slow
def test_warnings_and_the_end(model_dir: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A run prints its warnings and its last line; its log has what it has without `quiet`, and a resume may change it."""
    rows = conversations(12)
    rows[0]["messages"] += [{"role": "user", "content": "and?"}, {"role": "assistant", "content": ""}]  # the lint warns
    rows.append({"messages": []})
    skip = {"on_bad_row": "skip", "max_bad_rows": 0.5}
    given: dict[str, Any] = {**SHORT, **skip, "model_path": model_dir, "data_path": write_rows(tmp_path / "rows.jsonl", rows)}
    logs, printed = {}, {}
    for quiet in (False, True):
        run = tmp_path / f"run-{quiet}"
        forge.sft(**given, quiet=quiet, lint="off", ckpt_output_dir=run)
        printed[quiet] = capfd.readouterr().err
        logs[quiet] = (run / "log.txt").read_text()
    assert "step 4/4" in printed[False]
    said = printed[True].splitlines()
    # How many rows were dropped is said once, quiet or not.
    assert [printed[True].count("kept 12"), printed[False].count("kept 12")] == [1, 1]
    assert said[0] == "rows.jsonl: kept 12 of 13 rows; dropped 1 unreadable_row"
    assert said[1].startswith("lint: ")
    assert said[2].startswith("warn empty_turn (1): ")
    assert not [line for line in said if line.startswith(" ")]  # rows are in the log
    assert all("rows.jsonl:1 messages[" in log for log in logs.values())
    assert said[-1].startswith("finished: 4 steps")
    progress = ("device: ", "training on ", "step 4/4 ", "exported ", "steps ")
    assert all(any(line.startswith(each) for line in printed[False].splitlines()) for each in progress)
    assert not [line for line in said if line.startswith(progress)]
    assert len(logs[True].splitlines()) == len(logs[False].splitlines())
    assert all("step 4/4" in log for log in logs.values())
    again = forge.sft(**given, lint="off", ckpt_output_dir=tmp_path / "run-True")  # the same run, whatever it printed
    assert again.steps == 4
