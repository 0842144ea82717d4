"""The room that a run takes is counted from its settings, and a disk without it is refused by its figures."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest

import forge
from forge import RunDirectoryError
from forge._disk import is_everywhere, write_remedy
from forge.saving._room import Disk, Need, Room, exports_at_once, exports_kept, no_room, room_of, states_at_once
from forge.settings._settings import resolve
from forge_data._disk import unwritten

MIB = 2**20


def settings(**given: Any) -> Any:
    """Settings that say what is kept; by default as a run has them, with no state by the clock."""
    checkpoints = {
        "keep_last_n": 2,
        "keep_last_checkpoint_only": False,
        "accelerate_full_state_at_epoch": True,
        "full_state_every_steps": 0,
        "full_state_every_minutes": 0.0,
        "save_samples": 0,
        "checkpoint_at_epoch": False,
    }
    keep_best = given.pop("keep_best", False)
    return SimpleNamespace(
        checkpoints=SimpleNamespace(**{**checkpoints, **given}), evaluation=SimpleNamespace(keep_best=keep_best)
    )


PLAN = SimpleNamespace(num_samples=96, endless=False)
"""Four epochs of 24 samples, in 16 steps."""


@pytest.mark.parametrize(
    ("given", "states"),
    [
        ({"accelerate_full_state_at_epoch": False}, (1, 1)),
        ({}, (3, 3)),
        ({"accelerate_full_state_at_epoch": False, "full_state_every_minutes": 30.0}, (1, 3)),
        ({"full_state_every_steps": 1, "keep_last_n": 5}, (6, 6)),
        ({"full_state_every_steps": 8, "accelerate_full_state_at_epoch": False, "keep_last_n": 5}, (2, 2)),
        ({"full_state_every_steps": 0.5, "accelerate_full_state_at_epoch": False, "keep_last_n": 5}, (2, 2)),
        ({"keep_last_checkpoint_only": True}, (2, 2)),
    ],
)
def test_states_at_once(given: dict[str, Any], states: tuple[int, int]) -> None:
    """Those that are kept and one more, if so many are saved; what the clock saves is possible, not sure."""
    assert states_at_once(settings(**given), PLAN, 24, 16) == states


@pytest.mark.parametrize(
    ("given", "exports"),
    [
        ({}, (1, 1)),
        ({"save_samples": 30}, (4, 4)),
        ({"checkpoint_at_epoch": True}, (4, 4)),
        ({"save_samples": 30, "keep_last_checkpoint_only": True}, (1, 2)),
        ({"keep_best": True}, (1, 3)),
        ({"save_samples": 1}, (16, 97)),
        ({"save_samples": 0.25}, (4, 4)),
        ({"save_samples": 0.3}, (4, 4)),
    ],
)
def test_exports_at_once(given: dict[str, Any], exports: tuple[int, int]) -> None:
    """The last one and those between; a former best and a former newest stay until the new one is whole."""
    assert exports_at_once(settings(**given), PLAN, 24, 16) == exports


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/runs/a/config.yaml"),
            "/runs/a/config.yaml: cannot be written: No space",
        ),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "/runs/a: cannot be written: Disk quota exceeded"),
        (OSError(errno.EACCES, "Permission denied"), None),
        (OSError(errno.EACCES, "Permission denied", "/data/train.jsonl"), None),
        (OSError(errno.EACCES, "Permission denied", "/runs/a/data/x"), "/runs/a/data/x: cannot be read or written: Permission"),
        (RuntimeError("I/O error: No space left (os error 28)"), "/runs/a: cannot be written: I/O error: No space left"),
        (RunDirectoryError(errno.ENOSPC, "said already"), None),
        (ValueError("no"), None),
    ],
)
def test_a_full_disk_is_an_answer(error: Exception, named: str | None) -> None:
    """What the system says of a full disk anywhere in a run becomes one message, with the file; other errors stay."""
    found = no_room(error, Path("/runs/a"))
    assert (found is None) == (named is None)
    assert named is None or str(found).startswith(named)


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "its disk is full: make room"),
        (errno.EDQUOT, "the quota there is used up: remove files of this user"),
        (errno.EROFS, "its file system is read-only"),
        (errno.EFBIG, "larger than one may be there"),
        (errno.EACCES, "this user may not write there any more"),
        (errno.EIO, "its disk, or the server behind it, fails"),
    ],
)
def test_each_error_has_its_own_remedy(number: int, remedy: str) -> None:
    """Only a full disk is told to make room; what ranks report as text says the same as the error itself."""
    error = OSError(number, os.strerror(number), "/runs/a/x")
    found = str(no_room(error, Path("/runs/a")))
    assert remedy in found
    assert ("make room" in found) == (number == errno.ENOSPC)
    assert write_remedy(f"step_6 cannot be written: {error}") == write_remedy(error)


def test_a_limit_of_this_process_is_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other disk takes a file that `ulimit -f` or `ulimit -n` forbids; one does that a file system has no room for."""
    assert [is_everywhere(OSError(number, "")) for number in (errno.EMFILE, errno.ENOSPC)] == [True, False]
    for limit, everywhere in ((1 << 20, True), (resource.RLIM_INFINITY, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=limit: (soft, resource.RLIM_INFINITY))
        assert is_everywhere("step_6 cannot be written: [Errno 27] File too large") == everywhere


def test_a_run_without_end() -> None:
    """It makes ever more exports: one is sure, and so are the states that are kept."""
    endless = SimpleNamespace(num_samples=0, endless=True)
    assert exports_kept(settings(save_samples=8), endless, 24) is None
    assert exports_at_once(settings(save_samples=8), endless, 24, None) == (1, 1)
    assert states_at_once(settings(), endless, 24, None) == (3, 3)


def disk(free: int, surely: int, most: int, there: int = 0, remedies: tuple[str, ...] = ()) -> Disk:
    """A disk for full states of a MiB."""
    need = Need(what="full state", place=Path("/runs"), each=MIB, surely=surely, most=most, there=there)
    return Disk(place=Path("/runs"), free=free, needs=(need,), remedies=remedies)


def test_what_does_not_fit() -> None:
    """What surely does not fit is refused with the figures and what to set; what may not is a warning; what is there counts."""
    room = Room(disks=(disk(2 * MIB, 3, 3, remedies=("keep_last_n=1",)),))
    with pytest.raises(
        RunDirectoryError, match=r"at least 3\.0 MiB at its peak \(3 full states of 1\.0 MiB\), and 2\.0 MiB are free"
    ) as found:
        room.check(Path("/runs/a"))
    assert "keep_last_n=1" in str(found.value)
    assert found.value.exit_status == 2
    maybe = Room(disks=(disk(2 * MIB, 1, 3),))
    maybe.check(Path("/runs/a"))
    assert "1 to 3 full states" in maybe.lines()[0]
    assert "WARNING: the disk has less room" in maybe.lines()[0]
    Room(disks=(disk(MIB, 3, 3, there=2 * MIB),)).check(Path("/runs/a"))


@pytest.mark.parametrize(
    ("given", "remedies"),
    [
        ({"keep_last_n": 2}, ()),
        ({"keep_last_n": 2, "full_state_every_steps": 1}, ("keep_last_n=1", "keep_last_checkpoint_only=true")),
        ({"keep_last_n": 1, "full_state_every_steps": 1}, ()),
        ({"keep_last_n": 1, "save_samples": 24}, ("keep_last_checkpoint_only=true",)),
    ],
)
def test_a_remedy_is_one_that_helps(given: dict[str, Any], remedies: tuple[str, ...], tmp_path: Path) -> None:
    """Of what surely does not fit only settings are named with which the run surely takes less."""
    named = {"model_path": "m", "data_path": "d", "ckpt_output_dir": str(tmp_path), "adapter": "lora"}
    s = resolve(forge.sft.task.settings, ("argument", {**named, "accelerate_full_state_at_epoch": False, **given}))
    memory: Any = SimpleNamespace(state=3 * MIB, trained=MIB)
    (only,) = room_of(s, PLAN, 24, 16, "m", memory).disks
    assert only.remedies == remedies


@pytest.mark.parametrize("setting", ["emergency_dir", "checkpoint_storage"])
def test_a_remedy_is_of_the_disk_that_it_frees(setting: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer states in the run's directory leave as many in another place; fewer exports are copied less often, too."""
    (tmp_path / "spare").mkdir()
    monkeypatch.setattr("forge.saving._room._file_system", lambda place: int(place.is_relative_to(tmp_path / "spare")))
    given = {"model_path": "m", "data_path": "d", "ckpt_output_dir": str(tmp_path / "run"), "adapter": "lora"}
    kept = {"accelerate_full_state_at_epoch": False, "full_state_every_steps": 1, "keep_last_n": 2, "save_samples": 24}
    s = resolve(forge.sft.task.settings, ("argument", {**given, **kept, setting: str(tmp_path / "spare")}))
    memory: Any = SimpleNamespace(state=3 * MIB, trained=MIB)
    run, spare = room_of(s, PLAN, 24, 16, "m", memory).disks
    assert run.remedies == ("keep_last_n=1", "keep_last_checkpoint_only=true")
    assert spare.remedies == (("keep_last_checkpoint_only=true",) if setting == "checkpoint_storage" else ())


def test_headers_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tried against a lack of room: a model of 70B has the headers of 30 files."""
    (tmp_path / "model.safetensors").write_bytes(b"0" * 2 * MIB)
    read: list[str] = []
    monkeypatch.setattr("forge_dist.directory_task", lambda _: "causal")
    monkeypatch.setattr("forge_dist.base_dtype", lambda path, **_: read.append(path) or SimpleNamespace(itemsize=2))
    named = {"model_path": str(tmp_path), "data_path": "d", "ckpt_output_dir": str(tmp_path / "run"), "save_samples": 24}
    s = resolve(forge.sft.task.settings, ("argument", named))
    room = room_of(s, PLAN, 24, 16, str(tmp_path), None)
    assert room.disks[0].needs[1].each == 2 * MIB
    assert read == [str(tmp_path)]


@pytest.mark.parametrize(("setting", "less"), [("emergency_dir", ""), ("checkpoint_storage", ", take less (keep_last_n=1)")])
def test_another_disk_does_not_fit(setting: str, less: str) -> None:
    """The setting that names it is refused, with what helps there; on the run's own disk it is the run's directory."""
    need = Need(what="state", place=Path("/spare"), each=2 * MIB, surely=1, most=1, setting=setting)
    spare = Disk(place=Path("/spare"), free=MIB, needs=(need,), remedies=("keep_last_n=1",) if less else ())
    with pytest.raises(RunDirectoryError) as found:
        Room(disks=(disk(9 * MIB, 3, 3), spare)).check(Path("/runs/a"))
    assert str(found.value) == (
        f"{setting} /spare: the disk of /spare has less room than the run takes: at least 2.0 MiB at its peak (1 state of 2.0 "
        f"MiB), and 1.0 MiB are free. Make room{less}, or give another directory, or leave {setting} out."
    )
    shared = attrs.evolve(spare, needs=(need, *disk(MIB, 1, 1).needs))
    with pytest.raises(RunDirectoryError, match=r"^ckpt_output_dir /runs/a: .* or give another directory\.$"):
        Room(disks=(shared,)).check(Path("/runs/a"))


@pytest.mark.parametrize("package", [False, True])
def test_a_directory_that_is_gone_is_named(tmp_path: Path, package: bool) -> None:
    """Removed or renamed while the run wrote it: said so, whoever found it; a missing file of one that is there is no such."""
    missing = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(tmp_path / "run" / "data"))
    error: Exception = missing
    if package:
        error = forge.data.StoreError(f"{tmp_path / 'run' / 'data'} is gone")
        error.__cause__ = missing
    found = no_room(error, tmp_path / "run")
    assert isinstance(found, forge.RunWriteError)
    assert f"{tmp_path / 'run'}: is gone: it was removed or renamed" in str(found)
    (tmp_path / "run").mkdir()
    assert not isinstance(no_room(error, tmp_path / "run"), forge.RunWriteError)


def test_too_few_open_files_say_which_limit(tmp_path: Path) -> None:
    """Whatever was opened: with its name, and what a run keeps; rows say the same on their own."""
    error = OSError(errno.EMFILE, os.strerror(errno.EMFILE), "tokenizer_config.json")
    assert str(no_room(error, tmp_path)).startswith("tokenizer_config.json: cannot be read or written: Too many open files. ")
    for number in (errno.EMFILE, errno.ENFILE):
        error = OSError(number, os.strerror(number))
        assert write_remedy(error).endswith("raise that limit")
        assert unwritten(error).endswith(write_remedy(error))
