"""Damage of every kind to every file of a full state: named, and the one before it is taken."""

import builtins
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from forge_dist import CheckpointError, Checkpoints
from forge_dist.checkpoints._manifest import _digest

from ..alone import Alone

SAME = {"seed": 7}


def tensors(step):
    return {"w": torch.arange(50.0) + step, "b": torch.tensor(step)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three whole full states."""
    root = tmp_path_factory.mktemp("saved") / "full_state"
    checkpoints = Checkpoints(root, Alone(), keep=3, background=False)
    checkpoints.newest(SAME, pytest.fail)
    for step in (10, 20, 30):
        checkpoints.save(step, tensors(step), {"step": step})
    return root


@pytest.fixture
def root(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "full_state")
    return tmp_path / "full_state"


def newest(root, must_match=SAME):
    """What is found, and what was reported."""
    message = []
    found = Checkpoints(root, Alone(), keep=3, background=False).newest(must_match, message.append)
    return found, message


def check_is(found, step):
    assert found.step == step
    into = {name: torch.zeros_like(tensor) for name, tensor in tensors(step).items()}
    found.read(into)
    assert all(torch.equal(into[name], tensor) for name, tensor in tensors(step).items())


def delete(file):
    file.unlink()


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def empty(file):
    file.write_bytes(b"")


def lengthen(file):
    file.write_bytes(file.read_bytes() + b"\0")


def flip_first(file):
    flip(file, 0)


def flip_middle(file):
    flip(file, file.stat().st_size // 2)


def flip_last(file):
    flip(file, file.stat().st_size - 1)


def flip(file, place):
    data = bytearray(file.read_bytes())
    data[place] ^= 4
    file.write_bytes(data)


def swap(file):
    shutil.copyfile(file.parent.parent / "step_20" / file.name, file)


def directory_instead(file):
    file.unlink()
    file.mkdir()


DAMAGES = [delete, truncate, empty, lengthen, flip_first, flip_middle, flip_last, swap, directory_instead]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("name", ["rank_0.safetensors", "manifest.json"])
def test_damage_is_named_and_the_one_before_is_taken(root, name, damage):
    """Every file × deleted, cut, lengthened, emptied, flipped, another step's: reported with the directory and the file;
    nothing of it is
    loaded; asked for by its path it is an error."""
    assert sorted(path.name for path in (root / "step_30").iterdir()) == ["manifest.json", "rank_0.safetensors"]
    damage(root / "step_30" / name)
    found, message = newest(root)
    check_is(found, 20)
    assert len(message) == 2
    assert "step_30 is not whole" in message[0]
    assert name in message[0]
    assert "step_20 is whole and is taken instead" in message[1]
    with pytest.raises(CheckpointError, match=f"step_30 is not whole.*{name}"):
        Checkpoints(root, Alone(), keep=3, background=False).at(root / "step_30", SAME)


def test_sizes_come_before_hashes(root, monkeypatch):
    """A file of another size is found without reading a byte of it: both sizes are reported, and nothing of this full state is
    hashed.
    """
    from forge_dist.checkpoints import _find as _checkpoint_find

    truncate(root / "step_30" / "rank_0.safetensors")
    hashed, real = [], _checkpoint_find.check_hash
    monkeypatch.setattr(
        _checkpoint_find, "check_hash", lambda file, written: (hashed.append(file.parent.name), real(file, written))[1]
    )
    found, message = newest(root)
    size = (root / "step_30" / "rank_0.safetensors").stat().st_size
    assert f"rank_0.safetensors has {size} bytes and should have {size + 1}" in message[0]
    assert found.step == 20
    assert hashed == ["step_20"]


def test_the_undamaged_is_taken_silently(root):
    """Nothing is reported about a full state that is whole, and files that others put beside ours do not matter."""
    (root / "step_30" / "notes.txt").write_text("mine")
    (root / "notes").mkdir()
    found, message = newest(root)
    check_is(found, 30)
    assert message == []
    check_is(Checkpoints(root, Alone(), keep=1, background=False).at(root / "step_10", SAME), 10)


def test_a_manifest_edited_with_its_hashes_is_caught_by_the_files(root):
    """Who gives the manifest a new digest after an edit of sizes or hashes still has the files against them."""
    file = root / "step_30" / "manifest.json"
    content = json.loads(file.read_text())
    content["files"]["rank_0.safetensors"]["sha256"] = "0" * 64
    content["sha256"] = _digest(content)
    file.write_text(json.dumps(content))
    assert newest(root)[0].step == 20


def test_a_renamed_one_is_not_taken_for_another_step(root):
    """A directory that bears another step's name is refused, even as the newest of all."""
    (root / "step_20").rename(root / "step_40")
    found, message = newest(root)
    check_is(found, 30)
    assert "is of step 20" in message[0]


@pytest.mark.parametrize("closed", ["", "step_30", "step_30/manifest.json", "step_30/rank_0.safetensors"])
def test_one_that_may_not_be_read_is_not_passed_over(root, closed, monkeypatch):
    """It is no damage: an older one would be taken, and this one deleted. Whose it is is said, and nothing changes."""
    place = root / closed
    before = sorted(root.rglob("*"))

    def refusing(call):
        def refused(path, *rest, **more):
            if not isinstance(path, int) and place in (Path(path), *Path(path).parents):
                raise PermissionError(13, "Permission denied", str(path))
            return call(path, *rest, **more)

        return refused

    for owner, name in ((os, "listdir"), (os, "scandir"), (io, "open"), (builtins, "open")):
        monkeypatch.setattr(owner, name, refusing(getattr(owner, name)))
    with pytest.raises(CheckpointError, match=rf"^{place}\S* belongs to .* may not read it. .* is not passed over"):
        newest(root)
    monkeypatch.undo()
    assert sorted(root.rglob("*")) == before


def test_none_is_whole(root):
    """Where all are broken the run must not begin anew over them: each is named, with what is wrong."""
    for step in (10, 20, 30):
        truncate(root / f"step_{step}" / "rank_0.safetensors")
    with pytest.raises(CheckpointError, match=r"none of the full states.*step_30: rank_0.*step_20: .*step_10: "):
        newest(root)


def test_nothing_was_ever_saved(tmp_path):
    """No directory, an empty one, and one with nothing but the leavings of a killed first save."""
    assert newest(tmp_path / "nowhere") == (None, [])
    (tmp_path / ".step_1.0a1b2c3d.tmp").mkdir()
    assert newest(tmp_path) == (None, [])
    assert list(tmp_path.iterdir()) == []


def test_another_run_is_refused(root):
    """Settings that decide about the past and differ are an error that names them; it is not passed over for an older one."""
    with pytest.raises(CheckpointError, match="step_30 belongs to another run: seed: 7 was saved, 8 is asked for"):
        newest(root, {"seed": 8})
    with pytest.raises(CheckpointError, match="belongs to another run"):
        Checkpoints(root, Alone(), keep=3, background=False).at(root / "step_30", {"seed": 8})
    assert newest(root)[0].step == 30


@pytest.mark.parametrize("version", [0, 3])
def test_another_version_is_refused(root, version):
    """A newest one of another format version is an error by name, and no reason to lose the work since the one before."""
    file = root / "step_30" / "manifest.json"
    content = json.loads(file.read_text()) | {"version": version}
    file.write_text(json.dumps(content | {"sha256": _digest(content)}))
    with pytest.raises(CheckpointError, match=f"step_30 is of format 'forge full state', version {version}"):
        newest(root)


def test_a_path_that_is_none(tmp_path):
    """A path without a full state is an error that names it."""
    with pytest.raises(CheckpointError, match=r"nowhere is no directory"):
        Checkpoints(tmp_path, Alone(), keep=1, background=False).at(tmp_path / "nowhere", {})
    with pytest.raises(CheckpointError, match="manifest.json is missing"):
        Checkpoints(tmp_path, Alone(), keep=1, background=False).at(tmp_path, {})


def test_going_back_makes_a_new_past(root):
    """A run that went back to step 10 by its path and was killed after saving step 15, before it threw the later ones
    away, goes on from
    step 15: what was finished last counts, not the largest number."""
    from forge_dist.checkpoints import _folder as _checkpoint_folder

    checkpoints = Checkpoints(root, Alone(), keep=3, background=False)
    checkpoints.at(root / "step_10", SAME)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_checkpoint_folder, "prune", lambda *_: None)
        checkpoints.save(15, tensors(15), {})
    assert (root / "step_30").exists()
    check_is(newest(root)[0], 15)
    checkpoints.save(16, tensors(16), {})
    assert sorted(path.name for path in root.glob("step_*")) == ["step_10", "step_15", "step_16"]


def test_reading_asks_for_what_was_saved(root):
    """A name, a shape or a dtype that was not saved is an error that names it and both sides; nothing is converted."""
    found, _ = newest(root)
    assert found.tensors == {"w": ((50,), torch.float32), "b": ((), torch.int64)}
    for into, words in [
        ({"v": torch.zeros(1)}, "does not hold v"),
        ({"w": torch.zeros(49)}, r"holds w as torch.float32 \[50\], and torch.float32 \[49\] is asked for"),
        ({"w": torch.zeros(50).double()}, r"torch.float64 \[50\] is asked for"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            found.read(into)
    found.read({})
    weight = torch.nn.Parameter(torch.zeros(50))
    found.read({"w": weight})
    assert torch.equal(weight.detach(), tensors(30)["w"])
    delete(root / "step_30" / "rank_0.safetensors")
    with pytest.raises(CheckpointError, match="rank_0.safetensors cannot be read"):
        found.read({"w": weight})
