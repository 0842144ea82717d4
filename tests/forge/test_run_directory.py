"""A run directory is whole or not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from forge import RunDirectoryError
from forge._run_directory import RunDirectory


def test_nothing_is_left_of_a_run_that_never_began(tmp_path: Path) -> None:
    """An error before `publish` removes what was prepared and the directories that were made for it."""
    with pytest.raises(ValueError, match="bad data"), RunDirectory(tmp_path / "a" / "b") as out:
        (out.root / "data").mkdir()
        out.log("something")
        raise ValueError("bad data")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_of_the_user_is_kept(tmp_path: Path) -> None:
    """A directory that was there before is there after, as empty as it was."""
    with pytest.raises(ValueError, match="x"), RunDirectory(tmp_path):
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []


def test_publish_moves_everything(tmp_path: Path) -> None:
    """After `publish` everything lies in its place, and the open files go on."""
    with RunDirectory(tmp_path / "run") as out:
        (out.root / "data").mkdir()
        (out.root / "config.yaml").write_text("seed: 1\n")
        out.log("before")
        out.publish()
        out.log("after")
        out.metrics({"step": 1})
        assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text()) == {"step": 1}, "flushed at once"
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == ["config.yaml", "data", "log.txt", "metrics.jsonl"]
    assert [line.split("  ")[1] for line in (tmp_path / "run" / "log.txt").read_text().splitlines()] == ["before", "after"]


def test_the_lock_dies_with_its_owner(tmp_path: Path) -> None:
    """A run killed with SIGKILL while preparing leaves a directory that the next run takes over."""
    code = "import os, sys\nfrom forge._run_directory import RunDirectory\nwith RunDirectory(sys.argv[1]) as out:\n    out.log('x')\n    os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=os.environ, check=False)
    assert killed.returncode == -9
    with RunDirectory(tmp_path / "run") as out:
        assert not (out.root / "log.txt").read_text()
        (out.root / "config.yaml").touch()
        out.publish()


def test_two_at_once(tmp_path: Path) -> None:
    """The second of two runs on one directory is refused and does not disturb the first."""
    with RunDirectory(tmp_path / "run") as first:
        with pytest.raises(RunDirectoryError, match="another run is writing"), RunDirectory(tmp_path / "run"):
            pass
        assert (first.root / "log.txt").exists()


def test_what_is_there_is_refused(tmp_path: Path) -> None:
    """Another run, somebody's files, or a file in the place of the directory: refused by name, untouched."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "a.tex").touch()
    (tmp_path / "file").touch()
    for name, message in (("run", "holds another run"), ("thesis", r"a\.tex"), ("file", "is a file")):
        with pytest.raises(RunDirectoryError, match=message), RunDirectory(tmp_path / name):
            pass
    assert (tmp_path / "thesis" / "a.tex").exists()
    assert (tmp_path / "file").is_file()
