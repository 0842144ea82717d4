"""Folders of a run: links to another disk, links to nothing, and what is no file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import forge
from forge import RunDirectoryError
from forge.run._run_directory import RunDirectory
from forge.saving._directories import remove_at_once
from forge.saving._full_state import FOLDER, remove_states


def test_of_a_link_the_link_alone_is_removed(tmp_path: Path) -> None:
    """What an export that somebody moved to another disk holds is theirs; a file under its name goes too."""
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "samples_8").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "samples_16").write_text("a file")
    for name in ("samples_8", "samples_16"):
        remove_at_once(tmp_path / name)
    assert [entry.name for entry in tmp_path.iterdir()] == ["elsewhere"]
    assert (tmp_path / "elsewhere" / "deep").is_dir()


def test_full_states_on_another_disk_are_removed(tmp_path: Path) -> None:
    """A finished run ended in an error where full_state was a link; its states go, the place and what else is there stay."""
    disk, run = tmp_path / "disk", tmp_path / "run"
    for name in ("step_3", "step_4", "mine"):
        (disk / name).mkdir(parents=True)
    (disk / "latest").write_text("step_4\n")
    run.mkdir()
    (run / FOLDER).symlink_to(disk)
    remove_states(run)
    assert [entry.name for entry in disk.iterdir()] == ["mine"]
    assert (run / FOLDER).is_symlink()
    (run / FOLDER).unlink()
    remove_states(run)


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "hf_format/hashes.json", "full_state/step_3/manifest.json"])
@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_a_pipe_or_a_device_is_refused(make: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """Whoever read one would wait, or read, without end: it is named before anything is read; logs are others' affair."""
    run = tmp_path / "run"
    with RunDirectory(run) as out:
        out.publish("model_path: m\n")
    (run / "logs").mkdir()
    os.mkfifo(run / "logs" / "socket")
    with RunDirectory(run) as out:
        assert out.resuming
    file = run / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    make(file)
    message = rf"{name}: is a pipe, a device or a socket, and no run has one\. Remove it\."
    with pytest.raises(RunDirectoryError, match=message), RunDirectory(run):
        pass
    with pytest.raises(RunDirectoryError, match=message):
        forge.repair(run)


@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_link_to_nothing_is_no_place(below: str, tmp_path: Path) -> None:
    """It is named as such: "File exists" said nothing."""
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for name in ("link", "loop"):
        with (
            pytest.raises(RunDirectoryError, match=rf"/{name} is a link to nothing\. Make what it"),
            RunDirectory(tmp_path / name / below),
        ):
            pass
