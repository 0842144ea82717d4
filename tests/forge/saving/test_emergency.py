"""A run directory's folder in emergency_dir: its own, whoever has a copy of the run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from forge.saving._emergency import adopt, claim, emergency_place


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
