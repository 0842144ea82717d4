"""Complete under the name, or not there."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest

from forge_dist import (
    ExportError,
    atomic_directory,
    check_guards,
    file_damage,
    file_hash,
    guarded,
    unreadable,
    write_text_atomically,
)
from forge_dist._files import room_lacking

SLOW_BODY = """
import sys, time
from forge_dist import atomic_directory
with atomic_directory(sys.argv[1]) as folder:
    (folder / "first").write_text("half")
    print("inside", flush=True)
    time.sleep(60)
    (folder / "second").write_text("half")
"""


def test_a_directory_appears_whole(tmp_path):
    """Until the body has ended nothing is under the name; then all of it is, and nothing else was left beside it."""
    target = tmp_path / "made" / "on the way" / "samples_10"
    with atomic_directory(target) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "file").write_text("text")
        assert not target.exists()
        assert folder.parent == target.parent
    assert (target / "sub" / "file").read_text() == "text"
    assert list(target.parent.iterdir()) == [target]


def test_a_relative_path_is_taken_from_here(tmp_path, monkeypatch):
    """The directory is made where the process stood, even if the body goes elsewhere."""
    monkeypatch.chdir(tmp_path)
    with atomic_directory("out") as folder:
        (folder / "file").write_text("text")
        os.chdir("/")
    assert (tmp_path / "out" / "file").is_file()


@pytest.mark.parametrize("error", [OSError("disk"), KeyboardInterrupt(), ValueError("x")])
def test_a_body_that_raises_leaves_nothing(tmp_path, error):
    """The body's own exception comes out, and neither the name nor the temporary directory is left."""
    with pytest.raises(type(error)), atomic_directory(tmp_path / "out") as folder:
        (folder / "file").write_text("text")
        raise error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["file", "empty directory", "full directory", "dangling link"])
def test_nothing_is_written_over(tmp_path, kind):
    """Whatever is under the name already, even an empty directory, is refused before the body runs, and stays."""
    target = tmp_path / "out"
    if kind == "file":
        target.write_text("mine")
    elif kind == "dangling link":
        target.symlink_to(tmp_path / "nowhere")
    else:
        target.mkdir()
    if kind == "full directory":
        (target / "mine").write_text("mine")
    with pytest.raises(ExportError, match="exists already"), atomic_directory(target):
        pytest.fail("the body ran")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_is_wrong_with_a_file(tmp_path):
    """Each kind of damage in words; what is no file is not spoken of by its bytes."""
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"weights")
    size, sha256 = file_hash(file)
    assert file_damage(file, size, sha256) is None
    assert file_damage(file, size + 1, sha256) == "model.safetensors has 7 bytes and should have 8"
    assert "another SHA-256" in file_damage(file, size, "0" * 64)
    file.unlink()
    assert file_damage(file, size, sha256) == "model.safetensors is missing"
    file.mkdir()
    assert file_damage(file, size, sha256).startswith(
        "model.safetensors is a directory, and a file of 7 bytes was written there"
    )
    file.rmdir()
    file.symlink_to(file)
    assert "cannot be read (Too many levels" in file_damage(file, size, sha256)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="root alone can be somebody else for a moment")
@pytest.mark.parametrize(
    ("closed", "asked"),
    [("run", "run/full_state/step_4/manifest.json"), ("run/full_state", "run/full_state"), ("run/full_state/step_4/m", None)],
)
def test_whose_a_closed_place_is(closed, asked):
    """The first part of the path that is closed, its owner and mode, and who asks; None where it is open, or not there."""
    with tempfile.TemporaryDirectory(dir="/tmp") as home:  # the folder of these tests may be closed itself
        os.chmod(home, 0o755)
        os.makedirs(os.path.join(home, "run/full_state/step_4"))
        with open(os.path.join(home, "run/full_state/step_4/m"), "w"):
            pass
        place = os.path.join(home, asked or closed)
        if os.path.exists(place):
            assert unreadable(place) is None
        os.chmod(os.path.join(home, closed), 0o600)
        os.seteuid(65534)
        try:
            said, open_there, nothing = unreadable(place), unreadable(home), unreadable(os.path.join(home, "nothing"))
        finally:
            os.seteuid(0)
        whose = f"{home}/{closed} belongs to root (uid 0), with mode 0600, and "
        assert said.startswith(whose)
        assert "uid 65534" in said.removeprefix(whose)
        assert said.endswith(" may not read it")
        assert (open_there, nothing) == (None, None)


def test_who_comes_second_loses(tmp_path):
    """A name that somebody took while the body ran is refused too; theirs stays, ours goes."""
    target = tmp_path / "out"
    with pytest.raises(ExportError, match="exists already"), atomic_directory(target) as folder:
        (folder / "ours").write_text("ours")
        target.mkdir()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert list(target.iterdir()) == []


def test_who_comes_second_is_refused_at_its_start(tmp_path):
    """While a living process writes the same name; its lock goes with it, and what a killed one left is in nobody's way."""
    target = tmp_path / "new" / "out"
    (tmp_path / ".out.1-0123abcd.tmp").mkdir()
    with (
        atomic_directory(tmp_path / "out"),
        atomic_directory(tmp_path / "out.b"),
        pytest.raises(ExportError, match=r"out is being written by another process now, in \.out\.\d+-\w+\.tmp: wait"),
        atomic_directory(tmp_path / "out"),
    ):
        pytest.fail("the body ran")
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), atomic_directory(target):
            1 / 0  # noqa: B018
        assert not target.parent.exists()


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    """Under a file no directory can be made: the error says which one was wanted."""
    (tmp_path / "file").write_text("")
    target = tmp_path / "file" / "out"
    with pytest.raises(ExportError, match="cannot be written") as caught, atomic_directory(target):
        pytest.fail("the body ran")
    assert str(target) in str(caught.value)


@pytest.mark.slow
def test_a_kill_leaves_nothing_under_the_name(tmp_path):
    """SIGKILL inside the body: nothing under the name, and a second try succeeds."""
    target = tmp_path / "out"
    process = subprocess.Popen([sys.executable, "-c", SLOW_BODY, str(target)], stdout=subprocess.PIPE, text=True)
    with process:
        assert process.stdout.readline() == "inside\n"
        process.send_signal(signal.SIGKILL)
    assert not target.exists()
    assert all(path.name.startswith(".out.") for path in tmp_path.iterdir())
    with atomic_directory(target) as folder:
        (folder / "file").write_text("text")
    assert (target / "file").is_file()


def test_text_is_written_as_it_is(tmp_path):
    """UTF-8, newlines untouched, over an older file, with nothing left beside it."""
    file = tmp_path / "config.yaml"
    for text in ("é\r\nline\n", "", "second"):
        write_text_atomically(file, text)
        assert file.read_bytes() == text.encode()
    assert list(tmp_path.iterdir()) == [file]


def test_text_that_cannot_be_written_spares_the_old(tmp_path, monkeypatch):
    """When the disk fails the old content is still there, no temporary file is left, and the error names the file."""
    file = tmp_path / "config.yaml"
    write_text_atomically(file, "old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ExportError, match=r"config\.yaml.*No space left"):
        write_text_atomically(file, "new")
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_directory_that_cannot_be_made_durable_is_not_there(tmp_path, monkeypatch):
    """A disk that fails at the last moment (fsync) costs the directory, not its completeness."""

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with (
        pytest.raises(ExportError, match=r"out cannot be written.*No space left"),
        atomic_directory(tmp_path / "out") as folder,
    ):
        (folder / "file").write_text("text")
    assert list(tmp_path.iterdir()) == []


def test_how_much_room_is_lacking(tmp_path, monkeypatch):
    """Both figures where an error's text says that a disk is full, of the folder that is there; nothing for another error."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: {tmp_path: shutil._ntuple_diskusage(9, 8, 1536)}[path])
    why = "out cannot be written: [Errno 28] No space left on device"
    said = "; it takes 3.0 MiB, and 1.5 KiB are free there"
    for full in (why, "I/O error: No space left on device (os error 28)"):
        assert room_lacking(tmp_path / "not" / "there", 3 * 2**20, full) == said
    assert room_lacking(tmp_path, 3 * 2**20, "[Errno 281] or [Errno 13] Permission denied") == ""


class Lost(RuntimeError):
    """The directory belongs to another process."""


def refuse():
    raise Lost


def test_a_guard_keeps_everything_as_it_was(tmp_path):
    """What may not be written any more gets no name: the old content stays, nothing is left beside it."""
    (tmp_path / "best.json").write_text("old")
    with guarded(tmp_path, refuse):
        with pytest.raises(Lost):
            write_text_atomically(tmp_path / "best.json", "new")
        with pytest.raises(Lost), atomic_directory(tmp_path / "hf_format" / "samples_8") as folder:
            (folder / "file").touch()
        with pytest.raises(Lost):
            check_guards(tmp_path)
    assert (tmp_path / "best.json").read_text() == "old"
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["best.json"]
    write_text_atomically(tmp_path / "best.json", "new")


def test_a_guard_concerns_its_directory_alone(tmp_path, monkeypatch):
    """Other directories, one whose name begins alike too, are none of its business; paths may be relative."""
    monkeypatch.chdir(tmp_path)
    with guarded("run", refuse):
        check_guards("run-2/file")
        check_guards(tmp_path)
        with pytest.raises(Lost):
            check_guards(tmp_path / "run" / "full_state" / ".." / "file")
    check_guards("run")
