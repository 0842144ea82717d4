"""Folders of a run that are links to another disk."""

from __future__ import annotations

from pathlib import Path

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
