"""What `hatch run processors` repeats: every test but those that a list excludes, with a reason each."""

import os
import subprocess
import sys
from pathlib import Path

import processors
import pytest

from ..lanes import ci_keeps

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_excluded_is_there():
    """Each entry is a test file or a folder of test files: one that was moved is excluded no more, and this says so."""
    for entry, why in processors.NOT_NUMERIC.items():
        path = ROOT / entry
        assert path.is_file() or list(path.rglob("test_*.py")), entry
        assert why


def test_every_other_test_is_repeated():
    """Nothing is lost between the list and the chunks, and what computes is among them."""
    files = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py")}
    chosen = processors.numeric_files()
    assert files - set(chosen) == {f for f in files if any(f == e or f.startswith(f"{e}/") for e in processors.NOT_NUMERIC)}
    for needed in (
        "forge-algos/losses",
        "forge-algos/isolation",
        "forge-dist/exporting",
        "forge-dist/strategies",
        "forge-dist/verifying",
    ):
        assert any(file.startswith(f"tests/{needed}/") for file in chosen), needed
    assert {"tests/whole/test_parity.py", "tests/whole/test_reference.py", "tests/whole/test_export.py"} <= set(chosen)
    chunks = processors.chunks(chosen)
    assert sorted(file for part in chunks.values() for file in part) == chosen
    assert max(map(len, chunks.values())) <= 8


@pytest.mark.parametrize(
    ("name", "expected"),
    ci_keeps(
        [("ATEN default, 1 thread", "DEFAULT 1")],
        [("ATEN default, 1 thread", "DEFAULT 1"), ("native, 3 threads", "3")],
    ),
)
def test_the_settings_reach_the_libraries(name, expected):
    """torch computes with the instruction set and the number of threads that a configuration names."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
    environ = os.environ | processors.CONFIGURATIONS[name]
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith(expected)


def test_the_page_says_what_ran_and_what_did_not(tmp_path, monkeypatch):
    """A run writes its own lines and leaves the others'; a failure is named, and what passes by now is said of it."""
    first, second, third = list(processors.CONFIGURATIONS)[:3]
    tests = ["tests/a/test_x.py::test_y[a|b, 1]", "tests/a/test_x.py::test_z"]
    assert processors.write(second, "1111111 with uncommitted changes", 5, tests, tmp_path) == tests
    monkeypatch.setattr(processors, "commit", lambda: "2222222")
    assert processors.write(first, "2222222", 7, [], tmp_path) == []
    known = processors.lines_of(tmp_path)
    assert " | 2222222 | " in known[first].row
    assert " | 1111111 with uncommitted changes | " in known[second].row
    assert known[second].row.endswith(" | 5 | 2")
    assert known[second].failed == dict.fromkeys(tests, "")
    assert known[third].row == ""
    assert f"| {third} | not run |" in (tmp_path / "processors.md").read_text()

    ran = []

    def run(_, test, environ, report):
        ran.append((test, environ["OMP_NUM_THREADS"], report.name))
        return {"says": "", "passed": 1, "failed": tests[1:] if test == tests[1] else []}

    monkeypatch.setattr(processors.lane, "tests", run)
    assert processors.repeat({second: processors.CONFIGURATIONS[second]}, tmp_path) == 1
    assert [test for test, *_ in ran] == tests
    assert processors.lines_of(tmp_path)[second].failed == {tests[0]: "passes at 2222222", tests[1]: ""}
    assert processors.lines_of(tmp_path)[first] == known[first]


def test_an_unknown_configuration_is_refused(capsys):
    """`--only` names what there is."""
    with pytest.raises(SystemExit) as caught:
        processors.main(["--only", "sse"])
    assert caught.value.code == 2
    assert "no configuration is called 'sse': native, 1 thread" in capsys.readouterr().err
