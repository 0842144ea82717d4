"""`hatch run proofs`: every test that CI leaves out is run by the lane, with all of its examples."""

import os
import re
import shutil
import subprocess
import sys

import proofs
import pytest
import quick
from repository import ROOT

MADE_UP = """
import pytest
from hypothesis import given, settings, strategies as st

from .lanes import ci_keeps, quick_keeps

seen = {"many": 0, "some": 0, "few": 0}

@settings(max_examples=300)
@given(st.integers())
def test_many(n): seen["many"] += 1

@settings(max_examples=20)
@given(st.integers())
def test_some(n): seen["some"] += 1

@settings(max_examples=3)
@given(st.integers())
def test_few(n): seen["few"] += 1

def test_plain(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.slow
@pytest.mark.lane
def test_long(): pass

@pytest.mark.parametrize(("a", "b"), ci_keeps([(1, "x")], [(1, "x"), pytest.param(1, "y", marks=pytest.mark.slow), (2, "y")]))
def test_cases(a, b): pass

@pytest.mark.parametrize("a", quick_keeps([1], ci_keeps([1, 2], [1, 2, 3])))
def test_looks(a): pass

@pytest.fixture(scope="session", autouse=True)
def counts():
    yield
    print("SEEN", *seen.values())
"""
IN_CI = {"test_many", "test_some", "test_few", "test_plain", "test_slow", "test_cases[1-x]", "test_looks[1]", "test_looks[2]"}
IN_THE_LANE = {"test_many", "test_some", "test_few", "test_long", "test_cases[1-y]", "test_cases[2-y]", "test_looks[3]"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run made-up tests under the repository's configuration; return who ran, and the three properties' numbers of examples."""
    root = tmp_path_factory.mktemp("made_up")
    (root / "tests").mkdir()
    shutil.copy(ROOT / "pytest.ini", root)
    for name in ("conftest.py", "lanes.py"):
        shutil.copy(ROOT / "tests" / name, root / "tests")
    (root / "tests" / "test_made_up.py").write_text(MADE_UP)

    def tests(*arguments):
        command = [sys.executable, "-m", "pytest", "-v", "-s", "-p", "no:cacheprovider", *arguments]
        done = subprocess.run(command, cwd=root, env=dict(os.environ), capture_output=True, text=True, check=True)
        found = set(re.findall(r"::(\S+) ", done.stdout))
        return found, [int(number) for number in re.findall(r"SEEN (\d+) (\d+) (\d+)", done.stdout)[0]]

    return tests


@pytest.mark.slow
def test_ci_and_the_lane_together_run_everything(run):
    """What CI leaves out, the lane runs; of a property CI draws a part, and the lane all that it asks for."""
    ci, lane, everything = run(), run(*proofs.SELECTED), run("-m", "")
    assert ci == (IN_CI, [30, 5, 3])
    assert lane == (IN_THE_LANE, [300, 20, 3])
    assert everything[0] == IN_CI | IN_THE_LANE


@pytest.mark.slow
def test_a_quick_run_has_neither_slow_tests_nor_the_lanes(run):
    """`hatch run quick` draws ten examples, of those properties too that ask for more."""
    assert run(*quick.QUICK) == (IN_CI - {"test_slow", "test_looks[2]"}, [10, 10, 3])


@pytest.mark.slow
def test_it_finds_the_files(monkeypatch, tmp_path):
    """Files with a marked test or a property, each once; an end without any is an error, and no empty lane."""
    folder = tmp_path / "tests"
    folder.mkdir()
    shutil.copy(ROOT / "pytest.ini", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", folder)
    monkeypatch.setattr(proofs, "ROOT", tmp_path)
    (folder / "test_plain.py").write_text("def test_a(): pass\n")
    with pytest.raises(SystemExit, match="no test for this lane"):
        proofs.files()
    (folder / "test_marked.py").write_text(
        "import pytest\npytestmark = pytest.mark.lane\ndef test_a(): pass\ndef test_b(): pass\n"
    )
    (folder / "test_drawn.py").write_text(
        "from hypothesis import given, strategies as st\n@given(st.integers())\ndef test_a(n): pass\n"
    )
    assert proofs.files() == ["tests/test_drawn.py", "tests/test_marked.py"]


def test_the_table_has_every_file_and_says_what_failed():
    """A row a file; a failure makes the lane fail."""
    results = {
        "a.py": {"says": "1 passed in 3 s", "failed": []},
        "b.py": {"says": "0 passed, 1 failed in 2 s", "failed": ["b.py::c"]},
    }
    body, failed = proofs.summary(results)
    assert body.endswith("\n\n1 failed:\n\n- `b.py::c`\n")
    assert failed
    assert "`a.py` | 1 passed in 3 s" in body
    assert not proofs.summary({"a.py": results["a.py"]})[1]
