"""The quickstart's own parts: its data, and its page from beginning to end on a model small enough for a test."""

from __future__ import annotations

import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import forge
import forge_data
from forge._errors import RunInterruptedError
from forge._progress import Reporter

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


@pytest.mark.lane
def test_the_questions_are_real_and_in_a_fixed_order(quickstart: ModuleType) -> None:
    """2,000 questions about public names of the standard library, the same each time, without the one that is asked later."""
    rows = quickstart.stdlib_questions(leave_out=quickstart.QUESTION)
    assert len(rows) == 2000
    assert rows == quickstart.stdlib_questions(leave_out=quickstart.QUESTION)
    asked = [row["messages"][0]["content"] for row in rows]
    assert len(set(asked)) == 2000
    assert quickstart.QUESTION not in asked
    assert all(row["messages"][1]["content"].strip() for row in rows)


def test_ctrl_c_says_one_line_and_the_same_command_goes_on(
    quickstart: Any, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 75 and one line where a state is saved, 130 before that; the next start continues the run."""
    monkeypatch.setattr(quickstart, "smollm2", lambda report: str(model_dir))
    monkeypatch.setattr(quickstart, "stdlib_questions", lambda leave_out: conversations(48))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--steps", "3", "--runs", str(tmp_path / "runs")])
    for where, status, line in (
        ((forge_data, "prepare"), 130, "quickstart: interrupted; the same command goes on from the last saved state, or"),
        ((Reporter, "step"), 75, "quickstart: stopped by SIGINT: "),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(*where, lambda *_, **__: signal.raise_signal(signal.SIGINT))
            assert quickstart.stoppable(quickstart.main) == status
        said = capsys.readouterr().err.splitlines()
        assert said[-1].startswith(line)
        assert "Traceback" not in said
    assert (tmp_path / "runs" / "quickstart" / "full_state" / "step_1").is_dir()
    capsys.readouterr()
    assert quickstart.stoppable(quickstart.main) == 0
    printed = capsys.readouterr()
    assert "resuming after step 1" in printed.err
    assert "goes on; the model as it was before it is asked again" in " ".join(printed.out.split())
    assert "what it answers before training" not in printed.out
    assert {entry.name for entry in (tmp_path / "runs").iterdir()} == {"quickstart", "quickstart-data.jsonl"}


def test_ctrl_c_in_a_script(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is a KeyboardInterrupt, says what became of the run, and has no frame of the run's inside."""
    rows = conversations(8)
    for where, status in ((forge_data, "prepare"), 130), ((Reporter, "step"), 75):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt) as caught:
            patched.setattr(*where, lambda *_, **__: signal.raise_signal(signal.SIGINT))
            forge.sft(model_path=model_dir, data_path=rows, ckpt_output_dir=tmp_path / "run", max_steps=2)
        assert isinstance(caught.value, RunInterruptedError)
        assert caught.value.exit_status == status
        assert caught.value.__context__ is None
        assert len(traceback.extract_tb(caught.value.__traceback__)) == 2
    assert str(caught.value).endswith("the same command resumes it.")


def test_the_page_runs(
    quickstart: ModuleType, model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From questions to an answer before and after; twice, in two run directories."""
    monkeypatch.setattr(quickstart, "smollm2", lambda report: str(model_dir))
    monkeypatch.setattr(quickstart, "stdlib_questions", lambda leave_out: conversations(48))
    monkeypatch.setattr(sys, "argv", ["quickstart.py", "--steps", "2", "--runs", str(tmp_path / "runs")])
    quickstart.main()
    printed, said = capsys.readouterr()
    assert "held-out rows are measured first, then step 1 of 2" in said
    for part in ("held-out loss", "before: ", "after: ", "forge generate", "report.html", f"--model-path {model_dir}"):
        assert part in printed
    assert "holds a finished run" not in printed
    quickstart.main()
    assert "quickstart holds a finished run" in " ".join(capsys.readouterr().out.split())
    assert {entry.name for entry in (tmp_path / "runs").iterdir()} == {"quickstart", "quickstart-2", "quickstart-data.jsonl"}
