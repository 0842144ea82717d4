"""What CI runs: every test folder once, each step after its environment; and what it says at the end."""

import os
import re
import shutil
import subprocess
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
    paths = [argument for step in tests for argument in step.command if argument.startswith("tests/")]
    folders = [path for path in paths if not path.endswith(".py")]
    assert sorted(folders) == sorted(f"tests/{path.name}" for path in ROOT.glob("tests/*/") if path.name != "__pycache__")
    (everything,) = [step for step in tests if any(path.endswith(".py") for path in step.command)]
    together = {leaf: files for leaf in LEAVES if (files := ci.together_files(ROOT / "tests" / leaf))}
    assert sorted(set(paths) - set(folders)) == sorted(file for files in together.values() for file in files)
    assert {f"--only-together=tests/{leaf}" for leaf in together} < set(everything.command)
    assert "tests/forge-dist/strategies/zero/test_strategy.py" in paths


def test_files_with_tests_that_need_more_than_the_leaf(tmp_path):
    """A file that marks a test `together`, and one that imports a helper which does; no helper, and no other file."""
    folder = tmp_path / "tests" / "forge-x"
    (folder / "below").mkdir(parents=True)
    (folder / "helper.py").write_text("def zero(test):\n    return pytest.mark.together(test)\n")
    (folder / "test_own.py").write_text("pytestmark = pytest.mark.together\n")
    (folder / "test_other.py").write_text("from .helpers import zero\n")
    (folder / "below" / "test_helped.py").write_text("from ..helper import zero\n")
    assert ci.together_files(folder) == ["tests/forge-x/below/test_helped.py", "tests/forge-x/test_own.py"]
    (folder / "helper.py").unlink()
    assert ci.together_files(folder) == ["tests/forge-x/test_own.py"]


def test_of_a_folder_only_what_is_marked_together(tmp_path):
    """pytest leaves out the other tests below the folder, and none beside it."""
    (tmp_path / "tests" / "forge-x").mkdir(parents=True)
    shutil.copy(ROOT / "pytest.ini", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    marked = "import pytest\n\n@pytest.mark.together\ndef test_here(): pass\n\ndef test_elsewhere(): pass\n"
    (tmp_path / "tests" / "forge-x" / "test_a.py").write_text(marked)
    (tmp_path / "tests" / "test_b.py").write_text("def test_beside(): pass\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run([*command, "--only-together=tests/forge-x"], cwd=tmp_path, capture_output=True, text=True, check=True)
    found = re.findall(r"::(\w+)", done.stdout)
    assert sorted(found) == ["test_beside", "test_here"]


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


def test_bytecode_is_made_once_and_then_taken():
    """A name that hatch.toml no longer has would warm nothing; who takes bytecode comes after the one that has it."""
    *_, beside = ci.steps()
    warmed = [number for number, step in enumerate(beside) if "tests.preload" in step.command[-1]]
    taking = [number for number, step in enumerate(beside) if "tools/bytecode.py" in step.command[-1]]
    assert (len(warmed), len(taking)) == (1, len(ci.TAKE_BYTECODE))
    assert warmed[0] < taking[0]


def test_how_long_the_processors_worked(tmp_path):
    """Idle and waiting are left out, and guests, who are counted as users already; without the file it is what was started."""
    (tmp_path / "stat").write_text("cpu  100 10 20 999 888 3 4 5 700 700\ncpu0 1 1 1 1\n")
    assert ci.busy_seconds(tmp_path / "stat") * os.sysconf("SC_CLK_TCK") == 100 + 10 + 20 + 3 + 4
    assert ci.busy_seconds(tmp_path / "missing") >= 0


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
    assert ci.summary([one, other], 70, 0.9) == 0
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
    assert ci.summary([step, check], 1, 0.9) == 1
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
