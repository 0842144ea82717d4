"""The quickstart's own parts: its data, and its page from beginning to end on a model small enough for a test."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from .conftest import conversations

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "quickstart"


@pytest.fixture
def quickstart(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The quickstart's modules, imported as its script imports them."""
    monkeypatch.syspath_prepend(str(FOLDER))
    for name in ("quickstart", "questions", "model"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import quickstart

    yield quickstart
    for name in ("quickstart", "questions", "model"):
        sys.modules.pop(name, None)


def test_the_questions_are_real_and_in_a_fixed_order(quickstart: ModuleType) -> None:
    """2,000 questions about public names of the standard library, the same each time, without the one that is asked later."""
    rows = quickstart.stdlib_questions(leave_out=quickstart.QUESTION)
    assert len(rows) == 2000
    assert rows == quickstart.stdlib_questions(leave_out=quickstart.QUESTION)
    asked = [row["messages"][0]["content"] for row in rows]
    assert len(set(asked)) == 2000
    assert quickstart.QUESTION not in asked
    assert all(row["messages"][1]["content"].strip() for row in rows)


def test_the_page_runs(
    quickstart: ModuleType, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From questions to an answer before and after; twice, in two run directories."""
    monkeypatch.setattr(quickstart, "smollm2", lambda report: str(model_dir))
    monkeypatch.setattr(quickstart, "stdlib_questions", lambda leave_out: conversations(48))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--steps", "2", "--runs", str(tmp_path / "runs")])
    quickstart.main()
    printed = capsys.readouterr().out
    for part in ("held-out loss", "before: ", "after: ", "forge generate"):
        assert part in printed
    quickstart.main()
    assert {entry.name for entry in (tmp_path / "runs").iterdir()} == {"quickstart", "quickstart-2", "quickstart-data.jsonl"}
