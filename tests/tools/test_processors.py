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
        [("ATEN default, 1 thread", "DEFAULT 1"), ("ATEN avx2, 3 threads", "AVX2 3")],
    ),
)
def test_the_settings_reach_the_libraries(name, expected):
    """torch computes with the instruction set and the number of threads that a configuration names."""
    code = "import torch; print(torch.backends.cpu.get_cpu_capability(), torch.get_num_threads())"
    environ = os.environ | processors.CONFIGURATIONS[name]
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


def test_the_table_names_every_failure():
    """A failed test is counted in its cell and named below, with its configuration."""
    results = {
        "one": {"tests/a 1": {"passed": 3, "failed": []}, "tests/b 1": {"passed": 2, "failed": []}},
        "other": {
            "tests/a 1": {"passed": 2, "failed": ["tests/a/test_x.py::test_y"]},
            "tests/b 1": {"passed": 2, "failed": []},
        },
    }
    text, failed = processors.summary(results)
    assert failed
    assert "| tests/a 1 | 3 | 2, **1 failed** |" in text
    assert "| **all** | 5 | 4 |" in text
    assert "- other: `tests/a/test_x.py::test_y`" in text
    assert not processors.summary({"one": results["one"]})[1]
