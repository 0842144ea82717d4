"""Planned run → the room that its full states and exports take on each disk, at its peak."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs

import forge_accel
import forge_data
import forge_dist
from forge._disk import error_number, what_stays, write_remedy
from forge._errors import ForgeError, RunDirectoryError, RunWriteError
from forge.memory._memory_plan import MemoryPlan, size
from forge.saving._full_state import FOLDER as STATES
from forge.saving._hashes import FOLDER
from forge.settings._backends import FORGE
from forge.settings._share import steps_between
from forge.storage._remote import Remote

_WRITING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})
"""Errors that only writing meets."""
_OF_A_DISK = frozenset({errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE})
_OF_RIGHTS = frozenset({errno.EACCES, errno.EPERM})
_RUN, _COPIES, _EMERGENCY = "ckpt_output_dir", "checkpoint_storage", "emergency_dir"
_MOMENTS = {"adamw": 2.0, "schedule_free": 2.0, "muon": 1.0, "adamw_8bit": 0.5}
"""Optimizer → numbers of four bytes that it keeps beside each weight, at least."""
_LESS = (("keep_last_n", 1), ("keep_last_checkpoint_only", True), ("save_dtype", "bfloat16"))
"""Settings with which a run may take less room: name and value."""


@attrs.frozen(kw_only=True)
class Need:
    """Files of one kind that a run writes to one place."""

    what: str
    """`full state` or `export`, or what of them lies elsewhere."""
    place: Path
    each: int
    """Bytes of one; 0 where that is not known before the model is loaded."""
    surely: int
    """How many there are at once, at the least."""
    most: int
    there: int = 0
    """Bytes of them that are there already."""
    setting: str = _RUN
    """Setting that names the place."""

    def adds(self, number: int) -> int:
        """Return the bytes that so many of them add to those that are there."""
        return max(0, number * self.each - self.there)

    def __str__(self) -> str:
        number = f"{self.surely}" if self.surely == self.most else f"{self.surely} to {self.most}"
        return f"{number} {self.what}{'s' * (self.most != 1)} of {size(self.each)}"


@attrs.frozen(kw_only=True)
class Disk:
    """Needs of a run on one file system."""

    place: Path
    free: int
    needs: tuple[Need, ...]
    remedies: tuple[str, ...] = ()
    """Settings with which the run surely takes less of this file system."""

    @property
    def surely(self) -> int:
        """Bytes that the run adds, at the least."""
        return sum(need.adds(need.surely) for need in self.needs)

    @property
    def most(self) -> int:
        """Bytes that the run adds, if all is saved that its settings allow."""
        return sum(need.adds(need.most) for need in self.needs)

    def __str__(self) -> str:
        what = ", ".join(map(str, self.needs))
        warning = "; WARNING: the disk has less room than that" if self.most > self.free else ""
        return f"disk: {size(self.most)} at the peak in {self.place} ({what}); {size(self.free)} are free{warning}"


@attrs.frozen(kw_only=True)
class Room:
    """Room that a run takes, a disk each."""

    disks: tuple[Disk, ...]

    def lines(self) -> list[str]:
        """Return the plan as lines for a person."""
        return [str(disk) for disk in self.disks]

    def check(self, path: Path) -> None:
        """Raise RunDirectoryError where a disk has less room than the run surely takes."""
        for disk in self.disks:
            if disk.surely > disk.free:
                what = ", ".join(str(attrs.evolve(need, most=need.surely)) for need in disk.needs)
                # Beside the run's own disk, the setting that names another one is what to change.
                setting = next((need.setting for need in disk.needs if need.setting == _RUN), disk.needs[0].setting)
                place = path if setting == _RUN else disk.place
                ways = f", take less ({', '.join(disk.remedies)})" if disk.remedies else ""
                without = "" if setting == _RUN else f", or leave {setting} out"
                raise RunDirectoryError(
                    f"{setting} {place}: the disk of {disk.place} has less room than the run takes: at least "
                    f"{size(disk.surely)} at its peak ({what}), and {size(disk.free)} are free. "
                    f"Make room{ways}, or give another directory{without}."
                )


def room_of(s: Any, plan: Any, samples: int, num_steps: int | None, model_path: str, memory: MemoryPlan | None) -> Room:
    """Plan the room of a run.

    Args:
        s: its settings.
        plan: its batch plan.
        samples: in one epoch.
        num_steps: optimizer steps; None without end.
        model_path: of the model that it starts from.
        memory: its memory plan, which knows what trains; None where it has none.

    """
    weights = _Weights(model_path)
    disks = _by_disk(_needs(s, plan, samples, num_steps, weights, memory))
    remedies: dict[int, list[str]] = {number: [] for number in disks}
    for name, value in _LESS if s.qat.qat is None else _LESS[:2]:  # whose exports keep every digit
        # Some settings do not go together, which is an error.
        with suppress(ValueError):
            less = _by_disk(_needs(s.with_value("checkpoints", name, value), plan, samples, num_steps, weights, memory))
            for number, disk in disks.items():
                if (less[number].surely if number in less else 0) < disk.surely:
                    remedies[number].append(f"{name}={str(value).lower()}")
    return Room(disks=tuple(attrs.evolve(disk, remedies=tuple(remedies[number])) for number, disk in disks.items()))


class _Weights:
    """Weights that a run starts from, of whose files each header is read once."""

    def __init__(self, model_path: str) -> None:
        self._path = model_path

    @cached_property
    def stored(self) -> int:
        """Bytes of the files."""
        return forge_dist.weight_bytes(self._path)

    @cached_property
    def width(self) -> int:
        """Bytes of a number."""
        return forge_dist.base_dtype(self._path, task=forge_dist.directory_task(self._path)).itemsize


def _needs(s: Any, plan: Any, samples: int, num_steps: int | None, weights: _Weights, memory: MemoryPlan | None) -> list[Need]:
    """Return the files of known sizes that a run writes; arguments as of `room_of`."""
    path = Path(s.checkpoints.ckpt_output_dir)
    state, export = _sizes(s, weights, memory)
    surely, most = states_at_once(s, plan, samples, num_steps)
    exports = exports_at_once(s, plan, samples, num_steps)
    needs = [
        Need(what="full state", place=path, each=state, surely=surely, most=most, there=_there(path / STATES)),
        Need(what="export", place=path, each=export, surely=exports[0], most=exports[1], there=_there(path / FOLDER)),
    ]
    if s.storage.checkpoint_storage is not None and (folder := Remote(s.storage.checkpoint_storage).local_folder) is not None:
        needs += [
            Need(
                what="copied full state",
                place=folder,
                each=state,
                surely=1,
                most=most,
                there=_there(folder / STATES),
                setting=_COPIES,
            ),
            Need(
                what="copied export",
                place=folder,
                each=export,
                surely=exports[0],
                most=exports[1],
                there=_there(folder / FOLDER),
                setting=_COPIES,
            ),
        ]
    if s.checkpoints.emergency_dir is not None:
        place = Path(s.checkpoints.emergency_dir)
        needs.append(Need(what="emergency full state", place=place, each=state, surely=1, most=1, setting=_EMERGENCY))
    return [need for need in needs if need.each]


def no_room(error: Exception, path: Path, *, begun: bool = True) -> Exception | None:
    """Return the error of a run whose files cannot be written; None where it is another.

    None too where it says what to do already. Its errno says that. Beside OSError, whatever names one in its text counts
    (safetensors has an error of its own), and an error of a package that follows from one stays of its kind. Missing rights
    count in the run directory alone: elsewhere they are those of what is read.

    Args:
        error: what ended the run.
        path: its directory.
        begun: whether that is a run already.

    """
    number = error_number(error)
    if number is None or isinstance(error, ForgeError):
        return None
    gone = _gone(error, number, path)
    if gone is not None:
        return gone
    stays, advice = what_stays(begun=begun), write_remedy(error)
    remedy = f"{stays}: {advice}."
    if hasattr(error, "exit_status"):
        said = advice in str(error)
        # forge_data says what to do, and knows of no run that stays.
        if number not in _WRITING or stays in str(error) or (said and not isinstance(error, forge_data.StoreError)):
            return None
        return type(error)(f"{str(error).rstrip('.')}. {f'{stays}.' if said else remedy}")
    named = getattr(error, "filename", None)
    within = isinstance(named, str) and Path(named).is_relative_to(path)
    if number not in _WRITING | _OF_A_DISK and not (number in _OF_RIGHTS and within):
        return None
    what = "written" if number in _WRITING else "read or written"
    why = (error.strerror if isinstance(error, OSError) else None) or " ".join(str(error).split())
    return RunWriteError(f"{named or path}: cannot be {what}: {why}. {remedy}")


def _gone(error: Exception, number: int, path: Path) -> RunWriteError | None:
    """Return the error of a run whose directory is gone; None where it is there."""
    if number not in (errno.ENOENT, errno.ENOTDIR) or path.is_dir() or str(path) not in str(error):
        return None
    return RunWriteError(
        f"{path}: is gone: it was removed or renamed while the run wrote it. Under this name again, the same command goes on "
        "from what was saved; without it, it begins anew."
    )


def states_at_once(s: Any, plan: Any, samples: int, num_steps: int | None) -> tuple[int, int]:
    """Count the full states that are on the disk at once: surely, and at most."""
    c = s.checkpoints
    keep = (1 if c.keep_last_checkpoint_only else c.keep_last_n) + 1
    if num_steps is None:
        number = keep
    else:
        epochs = -(-plan.num_samples // max(1, samples)) if c.accelerate_full_state_at_epoch else 0
        every = steps_between(c.full_state_every_steps, num_steps)
        number = max(1, epochs, num_steps // every if every else 0)
    return min(keep, number), keep if c.full_state_every_minutes else min(keep, number)


def exports_at_once(s: Any, plan: Any, samples: int, num_steps: int | None) -> tuple[int, int]:
    """Count the exports that are on the disk at once: surely, and at most."""
    kept, newest = exports_kept(s, plan, samples, num_steps), s.checkpoints.keep_last_checkpoint_only
    every = s.checkpoints.save_samples
    # The one that is replaced, a former best or the one before the newest, goes once the new one is whole.
    before = int(newest and bool(every or s.checkpoints.checkpoint_at_epoch)) + s.evaluation.keep_best
    surely = 1
    if num_steps is not None and not newest:
        between = _of_a_share(every, num_steps) if every < 1 else min(num_steps - 1, (plan.num_samples - 1) // every)
        surely += max(between, -(-plan.num_samples // max(1, samples)) - 1 if s.checkpoints.checkpoint_at_epoch else 0)
    return surely, max(surely, (1 if kept is None else kept) + before)


def _of_a_share(share: float, num_steps: int) -> int:
    """Count the exports before the last that are made after each share of a run's steps."""
    every = steps_between(share, num_steps)
    return (num_steps - 1) // every if every else 0


def exports_kept(s: Any, plan: Any, samples: int, num_steps: int | None = None) -> int | None:
    """Count the exports that are kept; None where a run without end makes ever more.

    `num_steps` are the run's optimizer steps, where they are not those of the plan.
    """
    if s.checkpoints.keep_last_checkpoint_only:
        return 1 + s.evaluation.keep_best
    every = s.checkpoints.save_samples
    if plan.endless:
        return None if every or s.checkpoints.checkpoint_at_epoch else 1 + s.evaluation.keep_best
    between = _of_a_share(every, num_steps or plan.num_steps) if every < 1 else plan.num_samples // every
    epochs = -(-plan.num_samples // max(1, samples)) if s.checkpoints.checkpoint_at_epoch else 0
    return 1 + between + max(0, epochs - 1) + s.evaluation.keep_best


def _sizes(s: Any, weights: _Weights, memory: MemoryPlan | None) -> tuple[int, int]:
    """Return the least bytes of a full state and of an export, 0 where they are not known."""
    known = memory is not None and memory.state > 0
    keeps = s.backend.backend == FORGE  # the others save no full states
    state = memory.state if memory is not None and known and keeps else 0
    if s.adapter.adapter not in ("none", "osft"):
        return state, memory.trained if memory is not None and known else 0
    if not weights.stored:
        return state, 0
    stored, width = weights.stored, weights.width
    asked = s.checkpoints.save_dtype
    if not known and keeps and s.adapter.adapter == "none":
        weight = getattr(forge_accel, s.device.weights).itemsize
        state = int((weight + 4 * _MOMENTS.get(s.optimizer.optimizer, 0.0)) * (stored // width))
    return state, stored if asked is None else stored // width * getattr(forge_accel, asked).itemsize


def _by_disk(needs: Sequence[Need]) -> dict[int, Disk]:
    """Group needs by file system: its number → the needs on it."""
    groups: dict[int, list[Need]] = {}
    for need in needs:
        groups.setdefault(_file_system(need.place), []).append(need)
    return {
        number: Disk(place=group[0].place, free=shutil.disk_usage(_existing(group[0].place)).free, needs=tuple(group))
        for number, group in groups.items()
    }


def _file_system(place: Path) -> int:
    return os.stat(_existing(place)).st_dev


def _existing(path: Path) -> Path:
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _there(folder: Path) -> int:
    """Return the bytes of the files of a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) if folder.is_dir() else 0
