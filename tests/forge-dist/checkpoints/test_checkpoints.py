"""Saving beside the training: copies, failures, what is kept."""

import contextlib
import os
import re
import subprocess
import threading

import numpy as np
import pytest
import torch

from forge_dist import CheckpointError, Checkpoints
from forge_dist.checkpoints import _manifest, _save as _checkpoint_save

from ..alone import Alone


def make(root, *, keep=2, background=True, note=None):
    return Checkpoints(root, Alone(), keep=keep, background=background, note=note or pytest.fail)


def names(root):
    return sorted(path.name for path in root.iterdir())


def read(found, name="w"):
    shape, dtype = found.tensors[name]
    into = {name: torch.zeros(shape, dtype=dtype)}
    found.read(into)
    return into[name].tolist()


@contextlib.contextmanager
def held(monkeypatch):
    """Saving stops before its file is written, until the event is set."""
    go, real = threading.Event(), _checkpoint_save.write_file

    def slow(*args):
        assert go.wait(60)
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(_checkpoint_save, "write_file", slow)
        try:
            yield go
        finally:
            go.set()


def test_the_copy_is_what_is_saved(tmp_path, monkeypatch):
    """While the file waits to be written the weights, the counters and what is said about them change; what is saved is what
    was.
    """
    checkpoints, weight, about = make(tmp_path), torch.ones(5), {"position": [1]}
    with held(monkeypatch) as go:
        checkpoints.save(1, {"w": weight}, about)
        weight.zero_()
        about["position"].append(2)
        assert names(tmp_path)[0].endswith(".tmp")
        assert checkpoints.last_good is None
        go.set()
        checkpoints.wait()
    found = make(tmp_path).newest({}, pytest.fail)
    assert (read(found), found.about) == ([1] * 5, {"position": [1]})
    assert checkpoints.last_good == tmp_path / "step_1"


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    """Two saves in a row both end whole, the first with its own values: its copy is not overwritten while it is written."""
    checkpoints, weight = make(tmp_path), torch.ones(5)
    with held(monkeypatch) as go:
        checkpoints.save(1, {"w": weight}, {})
        weight.add_(1)
        threading.Timer(0.2, go.set).start()
        checkpoints.save(2, {"w": weight}, {})
        weight.add_(1)
        checkpoints.save(3, {"w": weight}, {}, wait=True)
    assert names(tmp_path) == ["latest", "step_2", "step_3"]
    assert (tmp_path / "latest").read_text() == "step_3\n"
    opened = make(tmp_path)
    assert read(opened.at(tmp_path / "step_2", {})) == [2] * 5
    assert read(opened.newest({}, pytest.fail)) == [3] * 5


def test_in_the_foreground_it_is_there_at_once(tmp_path):
    """Without a thread nothing is copied and save() returns when the full state has its name."""
    checkpoints = make(tmp_path, background=False)
    checkpoints.save(1, {"w": torch.ones(2)}, {})
    assert names(tmp_path) == ["latest", "step_1"]
    assert checkpoints._copy._buffers == {}


def test_older_manifests_are_read_once(tmp_path, monkeypatch):
    """The serial of a save goes on from those on disk, which are read before the first save alone: each has megabytes."""
    make(tmp_path, background=False).save(1, {"w": torch.ones(2)}, {})
    reads, real = [], _manifest.read_manifest

    def counted(path, step):
        reads.append(path.name)
        return real(path, step)

    monkeypatch.setattr(_manifest, "read_manifest", counted)
    checkpoints = make(tmp_path, background=False, keep=5)
    for step in (2, 3, 4):
        checkpoints.save(step, {"w": torch.ones(2)}, {})
    assert reads == ["step_1"]
    assert [real(tmp_path / f"step_{step}", step).serial for step in (1, 2, 3, 4)] == [1, 2, 3, 4]


def test_leaving_waits(tmp_path, monkeypatch):
    """The end of a with statement, with or without an error, is the end of the save that was under way."""
    for step, error in [(1, None), (2, ValueError)]:
        with contextlib.suppress(ValueError), held(monkeypatch) as go, make(tmp_path) as checkpoints:
            checkpoints.save(step, {"w": torch.ones(2)}, {})
            threading.Timer(0.1, go.set).start()
            if error is not None:
                raise error
        assert (tmp_path / f"step_{step}").is_dir()
    checkpoints.close()


def test_what_must_match_is_remembered(tmp_path):
    """What newest() was asked to find is what is saved; a save may say otherwise; tuples are no difference."""
    checkpoints = make(tmp_path)
    assert checkpoints.newest({"betas": (0.9, 0.95)}, pytest.fail) is None
    checkpoints.save(1, {"w": torch.ones(2)}, {}, wait=True)
    assert make(tmp_path).newest({"betas": (0.9, 0.95)}, pytest.fail).step == 1
    checkpoints.save(2, {"w": torch.ones(2)}, {}, wait=True, must_match={"seed": 1})
    with pytest.raises(CheckpointError, match=r"betas.*seed"):
        make(tmp_path).newest({"betas": (0.9, 0.95)}, pytest.fail)


def test_a_passed_over_one_makes_room(tmp_path):
    """A full state that was found broken is no reserve: the next save deletes it, and does not count it."""
    checkpoints = make(tmp_path)
    for step in (1, 2, 3):
        checkpoints.save(step, {"w": torch.ones(2)}, {}, wait=True)
    assert names(tmp_path) == ["latest", "step_2", "step_3"]
    (tmp_path / "step_3" / "rank_0.safetensors").unlink()
    message = []
    again = make(tmp_path)
    assert again.newest({}, message.append).step == 2
    assert again.last_good == tmp_path / "step_2"
    assert names(tmp_path) == ["latest", "step_2", "step_3"]
    again.save(4, {"w": torch.ones(2)}, {}, wait=True)
    assert names(tmp_path) == ["latest", "step_2", "step_4"]


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_costs_the_save_only(tmp_path, background):
    """With a real limit on what a file may hold: nothing raises, nothing half-written is left, the last good one stays
    and is named, the
    failure is reported at the next wait or save; with room again the next save succeeds."""
    resource = pytest.importorskip("resource")
    message = []
    checkpoints = make(tmp_path, background=background, note=message.append)
    checkpoints.save(1, {"w": torch.ones(10)}, {}, wait=True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        checkpoints.save(2, {"w": torch.ones(100_000)}, {})
        checkpoints.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "step_2 cannot be written" in checkpoints.failed
    assert "File too large" in checkpoints.failed
    assert len(message) == 1
    assert checkpoints.failed in message[0]
    assert str(tmp_path / "step_1") in message[0]
    assert checkpoints.last_good == tmp_path / "step_1"
    assert names(tmp_path) == ["latest", "step_1"]
    checkpoints.save(3, {"w": torch.ones(100_000)}, {}, wait=True)
    assert checkpoints.failed is None
    assert len(message) == 1
    assert names(tmp_path) == ["latest", "step_1", "step_3"]


@pytest.mark.slow
def test_a_disk_without_room(tmp_path):
    """A real file system of 64 KiB: the first save fits, the second does not, and the first is still whole."""
    if (
        os.geteuid() != 0
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True).returncode
    ):
        pytest.skip("only root may mount a small file system")
    try:
        message = []
        checkpoints = make(tmp_path / "full_state", note=message.append)
        checkpoints.save(1, {"w": torch.ones(4_000)}, {}, wait=True)
        checkpoints.save(2, {"w": torch.ones(12_000)}, {})
        checkpoints.save(3, {"w": torch.ones(12_000)}, {}, wait=True)
        assert len(message) == 2
        assert re.search(
            r"No space left on device; it takes 46\.9 KiB, and [1-4]\d\.0 KiB are free there; .*step_1", message[0]
        )
        assert "step_1" in message[1]
        assert read(make(tmp_path / "full_state").newest({}, pytest.fail)) == [1] * 4_000
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("what", ["makes no directory", "commits nothing", "writes no latest"])
def test_every_failing_call_is_reported(tmp_path, monkeypatch, what):
    """A file in the way, a disk that fails at the manifest, and one that fails after it: reported, and never raised."""
    message = []
    root = tmp_path / "full_state"
    checkpoints = make(root, note=message.append)
    if what == "makes no directory":
        root.write_text("a file")
        checkpoints.save(1, {"w": torch.ones(2)}, {}, wait=True)
        assert "cannot be written" in checkpoints.failed
        assert "there is no other full state" in message[0]
        return

    def failing(*_):
        raise OSError(5, "Input/output error")

    if what == "commits nothing":
        monkeypatch.setattr(_checkpoint_save.folder, "finish", failing)
        checkpoints.save(1, {"w": torch.ones(2)}, {}, wait=True)
        assert "Input/output" in checkpoints.failed
        assert names(root) == []
    else:
        checkpoints.save(1, {"w": torch.ones(2)}, {}, wait=True)
        (root / "latest").unlink()
        (root / "latest").mkdir()
        checkpoints.save(2, {"w": torch.ones(2)}, {}, wait=True)
        assert checkpoints.failed is None
        assert checkpoints.last_good == root / "step_2"
        assert "latest cannot be written" in message[0]


def test_bad_calls_are_refused(tmp_path):
    """What can never be saved raises before anything is written, and leaves nothing behind."""
    checkpoints = make(tmp_path)
    for step, tensors, about, words in [
        (1, {"w": [1]}, {}, "w is list"),
        (1, {"w": torch.ones(1)}, {"x": torch.ones(1)}, "about of a full state must be JSON"),
        (-1, {"w": torch.ones(1)}, {}, "negative"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            checkpoints.save(step, tensors, about)
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="keep must be 1 or more"):
        make(tmp_path, keep=0)


def test_nothing_at_all_can_be_saved(tmp_path):
    """A full state without tensors is one."""
    checkpoints = make(tmp_path)
    checkpoints.save(0, {}, {"only": "this"}, wait=True)
    found = make(tmp_path).newest({}, pytest.fail)
    assert (found.step, found.tensors, found.about) == (0, {}, {"only": "this"})
    assert "step=0" in repr(found)


def test_a_state_is_streamed_where_the_host_has_no_room(tmp_path, monkeypatch):
    """Without room for a copy the state is on the disk when `save` returns, nothing was copied, and it is said once."""
    said, taken = [], []
    monkeypatch.setattr("forge_dist.checkpoints._checkpoints.room_for", lambda size, *, sharing: size * sharing < 8)
    monkeypatch.setattr("forge_dist.checkpoints._host_copy.HostCopy.take", lambda *_: taken.append(1))
    checkpoints = make(tmp_path, note=said.append)
    for step in (1, 2):
        checkpoints.save(step, {"w": torch.full((5,), float(step))}, {})
        assert checkpoints.last_good.name == f"step_{step}"
        assert read(checkpoints.at(checkpoints.last_good, {})) == [step] * 5
    assert taken == []
    (line,) = said
    assert "no room for a copy of the full state" in line


def test_a_step_is_a_whole_number(tmp_path):
    """A step of 2.0 would be written where no later run looks; a whole number of another library is one."""
    with make(tmp_path, background=False) as checkpoints:
        for step in (np.int64(1), torch.tensor(2)):
            checkpoints.save(step, {"w": torch.ones(1)}, {})
        for step in (3.0, True, "3", None, torch.tensor(3.0)):
            with pytest.raises(CheckpointError, match="the step of a full state is a whole number from 0, not "):
                checkpoints.save(step, {"w": torch.ones(1)}, {})
        assert checkpoints.newest({}, pytest.fail).step == 2
    assert names(tmp_path) == ["latest", "step_1", "step_2"]
