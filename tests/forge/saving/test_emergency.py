"""A run directory's folder in emergency_dir: its own, whoever has a copy of the run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest

from forge._errors import SettingsError
from forge.saving._emergency import adopt, check_emergency_dir, claim, emergency_place


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with an identity."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.json").write_text(json.dumps({"run": "1f0c"}))
    return tmp_path / "a"


def place(run: Path) -> Path:
    """Its folder."""
    found = emergency_place(str(run.parent / "elsewhere"), run, "1f0c")
    assert found is not None
    return found


def rescue(run: Path) -> Path:
    """Save what stands for a state."""
    claim(place(run), run)
    (place(run) / "step_6").mkdir()
    return place(run) / "step_6"


def test_a_copy_does_not_take_it(run: Path) -> None:
    """Two copies of a run have a folder each, and neither takes the other's while that is there."""
    state, copy = rescue(run), Path(shutil.copytree(run, run.with_name("b")))
    assert place(copy) != place(run)
    assert not adopt(place(copy), copy)
    assert adopt(place(run), run)
    assert state.is_dir()
    rescue(copy)
    assert adopt(place(copy), copy)
    assert state.is_dir()


def test_a_moved_run_finds_it(run: Path) -> None:
    """The former directory is gone, or holds another run by now: the state goes with the one that was moved."""
    rescue(run)
    moved = run.rename(run.with_name("b"))
    assert adopt(place(moved), moved)
    assert (place(moved) / "step_6").is_dir()
    again = moved.rename(run.with_name("c"))
    moved.mkdir()
    (moved / "run.json").write_text(json.dumps({"run": "another"}))
    assert adopt(place(again), again)
    assert json.loads((place(again) / "owner.json").read_text())["ckpt_output_dir"] == str(again.resolve())


def test_one_of_an_earlier_version_is_found(run: Path) -> None:
    """It was named by the run alone, and recorded nobody."""
    (run.parent / "elsewhere" / "forge-1f0c" / "step_6").mkdir(parents=True)
    assert adopt(place(run), run)
    assert (place(run) / "step_6").is_dir()


@pytest.mark.parametrize("text", ["", "[]", "{", "{}"])
def test_a_damaged_record_is_not_followed(text: str, run: Path) -> None:
    """Nothing tells whose it is: it stays where it lies; without emergency_dir there is nothing."""
    other = Path(shutil.copytree(run, run.with_name("b")))
    assert not adopt(place(run), run)
    rescue(run)
    (place(run) / "owner.json").write_text(text)
    assert not adopt(place(other), other)
    assert (place(run) / "step_6").is_dir()
    assert emergency_place(None, run, "1f0c") is None


def read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no file be made, as on a file system that is mounted so."""

    def refused(**_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "TemporaryFile", refused)


def test_emergency_dir_is_tried_before_it_is_needed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes a file is left as it was, not there with its parents; one that does not is refused by name."""
    elsewhere = run.parent / "far" / "elsewhere"
    check_emergency_dir(str(elsewhere), run, "1f0c", pytest.fail)
    assert not elsewhere.parent.exists()
    elsewhere.mkdir(parents=True)
    (elsewhere / "of others").touch()
    check_emergency_dir(str(elsewhere), run, "1f0c", pytest.fail)
    assert [entry.name for entry in elsewhere.iterdir()] == ["of others"]
    with pytest.raises(SettingsError, match=r"emergency_dir .*of others: cannot be written: .*give a directory that"):
        check_emergency_dir(str(elsewhere / "of others"), run, "1f0c", pytest.fail)
    read_only(monkeypatch)
    with pytest.raises(SettingsError, match=r"emergency_dir .*elsewhere: cannot be written: Read-only file system\. A full"):
        check_emergency_dir(str(elsewhere), run, "1f0c", pytest.fail)


def test_a_state_there_is_gone_on_from_though_nothing_can_be_written(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To refuse it would lose the state: it is a warning."""
    state, notes = rescue(run), []
    read_only(monkeypatch)
    check_emergency_dir(str(run.parent / "elsewhere"), run, "1f0c", notes.append)
    assert state.is_dir()
    assert len(notes) == 1
    assert notes[0].startswith("WARNING: emergency_dir ")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone can be somebody else for a moment")
def test_one_that_is_closed_to_this_user_is_refused(run: Path) -> None:
    """With whose it is, and no traceback."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # the folder of these tests may be closed itself
        Path(home).chmod(0o755)
        Path(home, "elsewhere").mkdir(mode=0o700)
        os.seteuid(65534)
        try:
            with pytest.raises(
                SettingsError, match=r"Permission denied \(.*elsewhere belongs to root \(uid 0\), with mode 0700"
            ):
                check_emergency_dir(f"{home}/elsewhere", run, "1f0c", pytest.fail)
        finally:
            os.seteuid(0)
