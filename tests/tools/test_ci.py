"""What CI runs: every test folder once, each step after its environment; and what it says at the end."""

import os
import re
import sys
import threading
from pathlib import Path

import ci
import pytest
from repository import FACADE, packages

ROOT = Path(__file__).resolve().parents[2]
LEAVES = sorted(set(packages()) - {FACADE})


def test_every_test_folder_runs_once():
    """No folder is forgotten, and none runs twice, but for the leaves' tests that need what the leaf alone lacks."""
    *lanes, _ = ci.steps()
    tests = [step for lane in lanes for step in lane]
    whole = [step for step in tests if ci.TOGETHER not in step.command]
    paths = [argument for step in whole for argument in step.command if argument.startswith("tests/")]
    assert sorted(paths) == sorted(f"tests/{path.name}" for path in ROOT.glob("tests/*/") if path.name != "__pycache__")
    (together,) = [step for step in tests if step not in whole]
    named = {argument for argument in together.command if argument.startswith("tests/")}
    assert named == {f"tests/{leaf}" for leaf in LEAVES if any("mark.together" in text for text in ci.sources(leaf))}
    assert named


@pytest.mark.parametrize("leaf", LEAVES)
def test_what_a_leaf_alone_skips_is_marked(leaf):
    """A leaf's test that needs DeepSpeed or another package of ours is marked `together`: elsewhere in CI it is skipped."""
    missing = re.compile(r'(?:importorskip|find_spec)\("(?:deepspeed|forge_\w+)"')
    files = [path for path in (ROOT / "tests" / leaf).rglob("*.py") if missing.search(path.read_text(encoding="utf-8"))]
    assert [path for path in files if "mark.together" not in path.read_text(encoding="utf-8")] == []


def test_each_environment_is_made_before_it_is_needed():
    """A step waits only for one of the last lane, in the order in which that lane makes them; so no lane waits for ever."""
    *lanes, beside = ci.steps()
    for tests in lanes:
        needed = [beside.index(step.needs) for step in tests]
        assert needed == sorted(needed)
    assert all(step.needs is None for step in beside)


def report(step, text):
    step.report.parent.mkdir(parents=True, exist_ok=True)
    step.report.write_text(f"<testsuites><testsuite>{text}</testsuite></testsuites>")


@pytest.fixture
def home(monkeypatch, tmp_path):
    monkeypatch.setattr(ci, "HOME", tmp_path)


def test_the_summary_says_where_the_time_went(home, capsys):
    """Steps with their times, the slowest files of all steps, counts of all steps on the last line."""
    one, other = ci.testing("one", None, ci.TWO, "x"), ci.testing("other", None, ci.TWO, "x")
    one.state, one.seconds = "ok", 61.0
    other.state, other.seconds = "ok", 5.0
    report(one, '<testcase file="a.py" name="t" time="60"/><testcase file="b.py" name="t" time="1"><skipped/></testcase>')
    report(other, '<testcase file="c.py" name="t" time="4"/>')
    assert ci.summary([one, other], 70) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["61", "s", "ok", "one", "1", "passed,", "1", "skipped"] for line in lines)
    assert [line.split()[-1] for line in lines if " tests  " in line] == ["a.py", "c.py", "b.py"]
    assert lines[-1] == "2 passed, 0 failed, 1 skipped"


@pytest.mark.parametrize(
    "text", ['<testcase file="a.py" name="t" time="1"><failure/></testcase>', '<testcase file="a.py" name="t" time="1"/>', None]
)
def test_a_failed_step_fails_and_is_counted(home, capsys, text):
    """A failed test, a run that failed after its tests passed, a run that left no report."""
    step = ci.testing("one", None, ci.TWO, "x")
    step.state = "FAILED"
    if text:
        report(step, text)
    check = ci.Step("check", ["x"], state="FAILED")
    assert ci.summary([step, check], 1) == 1
    printed = capsys.readouterr().out
    assert printed.splitlines()[-1].split(", ")[1] == "2 failed"
    assert "=== failed" in printed
    assert "check" in printed


def test_a_step_that_fails_stops_no_other(home, capsys):
    """Output and state are kept, and who waits for the step goes on."""
    first = ci.Step("first", [sys.executable, "-c", "print('said'); raise SystemExit(3)"])
    second = ci.Step("second", [sys.executable, "-c", "print('went on')"], first)
    for step in (first, second):
        step.run(dict(os.environ), threading.Lock())
    assert (first.state, second.state) == ("FAILED", "ok")
    printed = capsys.readouterr().out
    assert "said" in printed
    assert "went on" in printed
