"""Damaged finished run → the run whole again, or what of it only training again can make."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

import forge_dist
from forge._errors import PreemptedError, RunDirectoryError
from forge._result import RESULT, read_result
from forge._sealed import sealed
from forge.run._run import run as train
from forge.run._run_directory import RunDirectory
from forge.run._stores import whole_stores
from forge.saving._damage import Damage, again, damage_of, finished_values, has_result, remedy
from forge.saving._directories import check_files, run_values
from forge.saving._exports import put_back, samples_of
from forge.saving._full_state import FOLDER as STATES, closed_states, step_in
from forge.saving._hashes import (
    FILE,
    FOLDER,
    Hashes,
    damaged_files,
    hash_export,
    hashes_in_events,
    known_hashes,
    not_a_directory,
    write_hashes,
)
from forge.saving._mend import put_file, take_twins
from forge.settings._recipe import read_recipe, verb_of
from forge.settings._settings import resolve
from forge.settings._storage import StorageSettings
from forge.settings._trackers import TrackerSettings
from forge.verbs._registry import VERBS, task_of

_SCRATCH = ".forge-repairing"
"""Hidden folder of the run directory in which the last export is made again."""


def repair(run: str | Path) -> str:
    """Make a damaged run whole: every file of its exports as recorded, and the records.

    result.json and hashes.json are written again from events.jsonl; a file of an export is taken from another export that has
    the same, or the last export is made again from the full state of the last step, bit for bit. What cannot be made so, only
    training again makes. Data, plan and full states are verified by the training command itself.

    Args:
        run: A run directory.

    Returns:
        What was found, and what was done.

    Raises:
        RunDirectoryError: there is no such run, it is not finished, another process writes to it, or a part of it can only be
            trained again; what could be made whole is whole then.

    """
    path = Path(os.path.abspath(Path(run).expanduser()))
    try:
        return _repair(run, path)
    except PermissionError as error:
        where = error.filename or path
        closed = forge_dist.unreadable(where)
        why = f"{where}: {error.strerror}" if closed is None else f"{where}: {error.strerror}; {closed}"
        raise RunDirectoryError(
            f"{why}. Give the permission to read and write there (`chmod`, `chown`), or repair as a user who may."
        ) from error


def _repair(run: str | Path, path: Path) -> str:
    """Do what `repair` says, in the directory `path` of the `run` that was named."""
    if not (path / "config.yaml").is_file():
        raise RunDirectoryError(f"{run}: is no run directory (it holds no config.yaml).")
    check_files(path)
    run_values(path)
    verb = verb_of(path / "config.yaml")
    if verb not in VERBS:
        raise RunDirectoryError(f"{path / 'run.json'}: cannot be read, or names no verb. A run directory has one; put it back.")
    with RunDirectory(path):  # to the end: another repair would remove what this one makes
        shutil.rmtree(path / _SCRATCH, ignore_errors=True)
        if not has_result(path) and finished_values(path) is None:
            raise RunDirectoryError(
                f"{path}: its run is not finished, so that nothing is to be repaired: `forge {verb} {path / 'config.yaml'}` "
                "goes on with it."
            )
        put_back(path)
        damage, known = damage_of(path), {**hashes_in_events(path), **known_hashes(path)}
        said = _mend_result(path, damage)
        said += [
            f"{FOLDER}/{name}/{file}: taken from {source}" for name, file, source in take_twins(path, damage.exports, known)
        ]
        left = damage_of(path)
        lost = ""
        if left.exports and closed_states(path) is not None:
            done = f" Made whole: {'; '.join(said)}." if said else ""
            raise RunDirectoryError(f"{path}: is still damaged: {left}.{done} {remedy(path, verb, left)}")
        if left.exports and (state := _last_state(path)) is not None:
            try:
                said += _make_again(path, verb, state, left, known)
            except forge_dist.CheckpointError as error:
                lost = str(error)
        if damage.record is not None and known:
            write_hashes(path, known)
            said.append(f"{FOLDER}/{FILE}: written again from events.jsonl, for it {damage.record}")
        left = damage_of(path)
    if left:
        done = f" Made whole: {'; '.join(said)}." if said else ""
        raise RunDirectoryError(f"{path}: is still damaged: {left}.{done} {_only_training(path, verb, left, lost)}")
    if not said:
        return f"{path} is whole: each file of its exports has the SHA-256 that was recorded."
    return "\n".join([*said, f"{path} is whole again."])


def _mend_result(path: Path, damage: Damage) -> list[str]:
    """Write result.json again from events.jsonl; return what was done."""
    values = finished_values(path)
    if damage.result is None or values is None:
        return []
    forge_dist.write_text_atomically(path / RESULT, sealed(values))
    return [f"{RESULT}: written again from events.jsonl, for it {damage.result}"]


def _last_state(path: Path) -> Path | None:
    """Return the full state of the run's last step, if it was kept."""
    try:
        steps = read_result(path).steps
    except RunDirectoryError:
        return None
    states = _states(path)
    return next((state for state in states if step_in(state) == steps), None)


def _states(path: Path) -> list[Path]:
    """Return the full states of a run by their steps, whole or not.

    Raises:
        PermissionError: their folder may not be read.

    """
    folder = path / STATES
    names = os.listdir(folder) if folder.is_dir() else []
    return sorted((folder / name for name in names if name.startswith("step_")), key=step_in)


def _make_again(path: Path, verb: str, state: Path, damage: Damage, known: Mapping[str, Hashes]) -> list[str]:
    """Make the last export again from a full state; take what is damaged from there."""
    last = read_result(path).model_dir.name
    wanted = known.get(last)
    damaged = [
        name
        for name in damage.exports
        if (name == last or (wanted is not None and known.get(name) == wanted))
        and not_a_directory(path / FOLDER / name) is None
    ]
    if not damaged:
        return []
    if not state.is_dir():  # a link to nothing, or to itself
        raise forge_dist.CheckpointError(f"{state} is no directory")
    task, scratch = task_of(verb), path / _SCRATCH
    s: Any = resolve(
        task.settings,
        (f"recipe {path / 'config.yaml'}", read_recipe(path / "config.yaml", verb)),
        ("argument", {"ckpt_output_dir": str(scratch), "resume": str(state)}),
    )
    s = attrs.evolve(s, tracking=TrackerSettings(), storage=StorageSettings())
    try:
        try:
            made = train(task, s, whole_stores(task, path)).model_dir
        except PreemptedError as stopped:
            raise type(stopped)("stopped: what is damaged was left as it was, and the same command repairs it.") from stopped
        if wanted is not None and (other := damaged_files(made, wanted)):
            raise RunDirectoryError(
                f"{path}: made again from {state}, {', '.join(sorted(other))} of {last} differ from what was exported: were "
                "other versions of the packages installed then? Nothing of them was taken."
            )
        files = hash_export(made) if wanted is None else wanted
        for name in damaged:
            missing = [file for file in files if forge_dist.file_damage(path / FOLDER / name / file, *files[file]) is not None]
            for file in missing:
                put_file(made / file, path / FOLDER / name / file)
        if wanted is None:
            write_hashes(path, {**known, last: files})
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return [f"{FOLDER}/{name}: made again from {STATES}/{state.name}" for name in damaged]


def _only_training(path: Path, verb: str, damage: Damage, lost: str) -> str:
    """Say which command makes what is left; `lost` is what is wrong with the last full state."""
    if not damage.exports:
        return f"Only training again makes it: {again(path, verb)}."
    if any(not_a_directory(path / FOLDER / name) is not None for name in damage.exports):
        return "Repair again after that."
    why = f"The full state of its step is damaged too: {lost}" if lost else "No full state of its step was kept"
    counts = [count for name in damage.exports if (count := samples_of(name)) is not None]
    before = [state for state in _states(path) if not lost or state != _last_state(path)]
    if before and counts:
        from_there = f" with `--resume {before[0]}` it begins there, if that step is before the export's."
        first = f"{why}. " if lost else ""
        return f"{first}Only training again makes it: {again(path, verb)};{from_there}"
    return f"{why}: only training again makes it: {again(path, verb)}."
