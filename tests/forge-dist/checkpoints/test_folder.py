"""Names of full states, and what is thrown away."""

import attrs
import pytest

from forge_dist import guarded
from forge_dist.checkpoints._folder import announce, begin, finish, listed, prune, tidy

from .test_manifest import EXAMPLE


def put(root, step, mark=""):
    """A finished full state that holds one file with `mark`."""
    temporary = begin(root, step)
    (temporary / "data").write_text(mark)
    return finish(temporary, root, attrs.evolve(EXAMPLE, step=step))


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_it_appears_at_once(tmp_path):
    """Until it is finished nothing bears the name; then everything is there and nothing hidden is left."""
    root = tmp_path / "run" / "full_state"
    temporary = begin(root, 5)
    assert listed(root) == []
    (temporary / "data").write_text("x")
    assert finish(temporary, root, attrs.evolve(EXAMPLE, step=5)) == root / "step_5"
    assert names(root) == ["step_5"]
    assert names(root / "step_5") == ["data", "manifest.json"]


def test_the_same_step_is_replaced(tmp_path):
    """A full state of a step that there is takes its place, whole."""
    put(tmp_path, 5, "old")
    put(tmp_path, 5, "new")
    assert names(tmp_path) == ["step_5"]
    assert (tmp_path / "step_5" / "data").read_text() == "new"


def test_a_rename_that_fails_gives_the_name_back(tmp_path, monkeypatch):
    """If the new one cannot take the name, the old one has it again."""
    put(tmp_path, 5, "old")
    temporary = begin(tmp_path, 5)
    real = type(tmp_path).rename

    def failing(self, target):
        if self == temporary:
            raise OSError(5, "Input/output error")
        return real(self, target)

    monkeypatch.setattr(type(tmp_path), "rename", failing)
    with pytest.raises(OSError, match="Input/output"):
        finish(temporary, tmp_path, attrs.evolve(EXAMPLE, step=5))
    assert (tmp_path / "step_5" / "data").read_text() == "old"


def test_everything_is_durable_before_it_has_its_name(tmp_path, monkeypatch):
    """The manifest and the directory's entries are on the disk before the rename, and the rename before anything is deleted."""
    import os
    import shutil

    done = []
    real_sync, real_rename, real_remove = os.fsync, type(tmp_path).rename, shutil.rmtree
    place = "/proc/self/fd/{}"
    if not os.path.exists(place.format(0)):
        pytest.skip("this system does not say which file a descriptor is of")

    def sync(descriptor):
        done.append(("sync", os.path.basename(os.readlink(place.format(descriptor)))))
        return real_sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(type(tmp_path), "rename", lambda self, to: (done.append(("rename", to.name)), real_rename(self, to))[1])
    monkeypatch.setattr(shutil, "rmtree", lambda *a, **k: (done.append(("remove", "")), real_remove(*a, **k))[1])
    put(tmp_path, 4)
    temporary = tmp_path / names(tmp_path)[0]
    assert [done[0], done[2], done[3]] == [("sync", "manifest.json"), ("rename", "step_4"), ("sync", tmp_path.name)]
    assert done[1][1].startswith(".step_4.")
    assert temporary.name == "step_4"
    done.clear()
    put(tmp_path, 4)
    assert [kind for kind, _ in done] == ["sync", "sync", "rename", "rename", "sync", "remove"]


def test_what_a_killed_run_left_is_undone(tmp_path):
    """Half-written and half-deleted ones go, one that was being replaced is there again unless it was, and everything else
    stays.
    """
    put(tmp_path, 5, "good")
    for name in (".step_6.0a1b2c3d.tmp", ".step_4.0a1b2c3d.pruned", ".step_5.0a1b2c3d.replaced", ".step_3.0a1b2c3d.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text(name)
    (tmp_path / ".latest.12-0a1b2c3d.tmp").write_text("step_")
    (tmp_path / ".mine").mkdir()
    (tmp_path / "step_x").mkdir()
    (tmp_path / ".step_9.tmp").write_text("not ours")
    tidy(tmp_path)
    assert names(tmp_path) == [".mine", ".step_9.tmp", "step_3", "step_5", "step_x"]
    assert (tmp_path / "step_3" / "data").read_text() == ".step_3.0a1b2c3d.replaced"
    assert (tmp_path / "step_5" / "data").read_text() == "good"
    assert [path.name for path in listed(tmp_path)] == ["step_5", "step_3"]
    tidy(tmp_path / "nowhere")
    assert listed(tmp_path / "nowhere") == []


@pytest.mark.parametrize(
    ("steps", "newest", "keep", "broken", "left"),
    [
        ([1, 2, 3], 3, 2, [], ["step_2", "step_3"]),
        ([1, 2, 3], 3, 1, [], ["step_3"]),
        ([1, 2, 3], 3, 5, [], ["step_1", "step_2", "step_3"]),
        ([9, 10, 11], 11, 2, [], ["step_10", "step_11"]),  # by number, not by letter
        ([1, 2, 3], 3, 2, [2], ["step_1", "step_3"]),  # a broken one is no reserve
        ([1, 2, 8], 2, 2, [], ["step_1", "step_2"]),  # the run went back: what came later is of another past
        ([1, 2, 3], 3, 2, [3], ["step_2", "step_3"]),  # it was broken, and has been written anew
    ],
)
def test_what_is_kept(tmp_path, steps, newest, keep, broken, left):
    """The newest and those before it, as many as asked for; never a broken one instead of a good one."""
    for step in steps:
        put(tmp_path, step)
    assert prune(tmp_path, tmp_path / f"step_{newest}", keep, [tmp_path / f"step_{step}" for step in broken]) is None
    assert names(tmp_path) == left


def test_what_cannot_be_deleted_is_reported(tmp_path, monkeypatch):
    """A disk that refuses costs a remark, not the new full state."""
    for step in (1, 2):
        put(tmp_path, step)

    def failing(self, target):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(type(tmp_path), "rename", failing)
    assert "step_1 cannot be removed" in prune(tmp_path, tmp_path / "step_2", 1, [])
    assert names(tmp_path) == ["step_1", "step_2"]


def test_what_is_no_directory_is_deleted_too(tmp_path):
    """A file under a full state's name, or a link to one on another disk, whose content stays."""
    put(tmp_path, 5)
    put(tmp_path / "disk", 3)
    (tmp_path / "step_3").symlink_to(tmp_path / "disk" / "step_3")
    (tmp_path / "step_4").write_text("a file")
    assert prune(tmp_path, tmp_path / "step_5", 1, []) is None
    assert names(tmp_path) == ["disk", "step_5"]
    assert (tmp_path / "disk" / "step_3" / "data").is_file()


def test_latest_is_a_line_of_text(tmp_path):
    """For `cat` and scripts; what goes wrong with it is returned."""
    assert announce(tmp_path, tmp_path / "step_5") is None
    assert (tmp_path / "latest").read_text() == "step_5\n"
    assert "cannot be written" in announce(tmp_path / "nowhere", tmp_path / "step_6")


def test_a_directory_that_was_lost_is_left_alone(tmp_path):
    """A guard that refuses keeps a full state from getting its name, and those that are there from being removed."""

    def refuse():
        raise RuntimeError("lost")

    put(tmp_path, 5, "old")
    temporary = begin(tmp_path, 5)
    with guarded(tmp_path, refuse):
        with pytest.raises(RuntimeError, match="lost"):
            finish(temporary, tmp_path, attrs.evolve(EXAMPLE, step=5))
        with pytest.raises(RuntimeError, match="lost"):
            prune(tmp_path, tmp_path / "step_9", 1, ())
    assert (tmp_path / "step_5" / "data").read_text() == "old"
    tidy(tmp_path)
    assert names(tmp_path) == ["step_5"]
