"""Bytecode of one environment in another: taken where the text is the same, and used there by Python."""

import os
import subprocess
import sys
from pathlib import Path

import bytecode
import pytest

TEXT = "def where():\n    return where.__code__.co_filename, __cached__\n"


@pytest.fixture
def folders(tmp_path):
    """Two folders of packages with the same modules, of other times, of which the first is compiled, in part."""
    made = []
    for name, seconds in (("one", 1_600_000_000), ("other", 1_700_000_001)):
        package = tmp_path / name / "package"
        package.mkdir(parents=True)
        for module in ("__init__", "same", "changed", "of_another_size", "missing", "not_imported"):
            text = package / f"{module}.py"
            text.write_text(TEXT)
            os.utime(text, (seconds, seconds))
        made.append(tmp_path / name)
    for module, text in {"changed": TEXT.replace("where", "there"), "of_another_size": TEXT + "\n"}.items():
        (made[1] / "package" / f"{module}.py").write_text(text)
    (made[1] / "package" / "missing.py").unlink()
    imported(made[0], "same", "changed", "of_another_size", "missing")
    return made


def imported(folder, *modules, flags=()):
    """Import modules in a new Python; return what it printed."""
    code = "import importlib\n" + "".join(f"print(importlib.import_module('package.{m}').where())\n" for m in modules)
    environ = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, *flags, "-c", code]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=True)


def test_what_is_the_same_is_compiled_once(folders):
    """Of modules with the same text alone; Python takes what is there, and names the file that it lies beside."""
    one, other = folders
    assert bytecode.reuse(one, other) == 2
    compiled = sorted(path.name.partition(".")[0] for path in other.rglob("*.pyc"))
    assert compiled == ["__init__", "same"]
    before = {path: path.stat().st_mtime_ns for path in other.rglob("*.pyc")}
    done = imported(other, "same", flags=["-v"])
    same = other / "package" / "same.py"
    assert done.stdout.split("'")[1] == str(same)
    assert f"matches {same}" in done.stderr
    assert f"code object from '{same}'" not in done.stderr, "it was compiled again"
    assert {path: path.stat().st_mtime_ns for path in other.rglob("*.pyc")} == before
    assert bytecode.reuse(one, other) == 0


def test_bytecode_of_a_text_that_has_changed_since_is_left(folders):
    """Python would not take it either."""
    one, other = folders
    for folder in folders:
        (folder / "package" / "same.py").write_text(TEXT.replace("where", "there"))
    assert bytecode.reuse(one, other) == 1
    assert "'there'" not in imported(other, "__init__").stdout


def test_an_environment_that_is_not_there(tmp_path):
    """Gives nothing."""
    assert bytecode.reuse(bytecode.beside("no such environment"), tmp_path) == 0
    assert bytecode.packages().is_relative_to(Path(sys.prefix))
