"""Temporary folders of killed processes are removed by the next one; those of living ones, and of others, are not."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from forge_dist import _temporary, temporary_folder

HOLD = """
import sys
from forge_dist import temporary_folder
with temporary_folder() as folder:
    (folder / "held").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""


def test_the_next_process_removes_what_a_killed_one_left(tmp_path, monkeypatch):
    """kill -9 leaves the folder; the next process of the same user on this machine removes it, and no living one's."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    held = [
        subprocess.Popen(
            [sys.executable, "-c", HOLD],
            env={**os.environ, "TMPDIR": str(tmp_path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    killed, living = (Path(process.stdout.readline().strip()) for process in held)
    held[0].kill()
    held[0].wait()
    other = tmp_path / f"forge-00000000-{held[0].pid}-abc"
    stranger = tmp_path / "forge-mine"
    file = tmp_path / killed.name.replace(killed.name[-3:], "fil")
    other.mkdir(), stranger.mkdir(), file.touch()
    assert (killed / "held").exists()
    with temporary_folder() as folder:
        assert folder.parent == tmp_path
        assert not killed.exists()
        assert (living / "held").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([living.name, other.name, stranger.name, file.name])
    held[1].communicate("")
    assert not living.exists()
    held[0].stdin.close(), held[0].stdout.close()


def test_the_folder_of_a_process_is_its_own(tmp_path, monkeypatch):
    """Two folders of one process live side by side, and each is removed at its own end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with temporary_folder() as one:
        with temporary_folder() as two:
            assert one != two
            assert one.exists()
            assert _temporary._NAME.fullmatch(two.name)
        assert one.exists()
        assert not two.exists()
    assert list(tmp_path.iterdir()) == []
