"""Paths of runs → folders made and removed without leaving halves, last exports, settings."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

import forge_dist
from forge._errors import RunDirectoryError, SettingsError
from forge.locking._run_lock import unwritable
from forge.settings._recipe import values_in

_OF_OTHERS = ("logs", "trackers", "evals")
"""Folders of a run in which other programs write."""


def newest_state(path: Path) -> str | None:
    """Return the name of a run's newest complete full state; None without."""
    with suppress(OSError):
        return (path / "full_state" / "latest").read_text(encoding="utf-8").strip()
    return None


def next_start(path: Path) -> str:
    """Say what the command of a run that ended early does when it is given again."""
    latest = path / "full_state" / "latest"
    try:
        return f"the same command goes on from {latest.with_name(latest.read_text(encoding='utf-8').strip())}."
    except OSError:
        return "nothing was saved to go on from, and the same command begins anew."


def make_directories(path: Path) -> list[Path]:
    """Make a directory with its parents, and return those that were missing.

    Raises:
        RunDirectoryError: it is a file, or cannot be made.

    """
    missing: list[Path] = []
    made: list[Path] = []
    above = path
    try:
        while not above.exists():
            if above.is_symlink():
                raise RunDirectoryError(
                    f"ckpt_output_dir {path}: {above} is a link to nothing. Make what it leads to, or give another directory."
                )
            missing.append(above)
            above = above.parent
        if not above.is_dir():
            raise RunDirectoryError(f"ckpt_output_dir {path}: {above} is a file. Give a directory, new or empty.")
        for folder in reversed(missing):
            folder.mkdir(exist_ok=True)
            made.append(folder)
    except OSError as error:
        remove_empty(made)
        if isinstance(error, RunDirectoryError):
            raise
        raise unwritable(f"ckpt_output_dir {path}", error) from error
    return made


def check_files(path: Path) -> None:
    """Refuse a run that holds a pipe, a device or a socket: to read one may never end.

    Raises:
        RunDirectoryError: it names the first one.

    """
    for folder, names, files in os.walk(path):
        if folder == str(path):
            names[:] = [name for name in names if name not in _OF_OTHERS]
        for name in files:
            file = Path(folder, name)
            try:
                mode = file.stat().st_mode
            except OSError:
                continue  # a link to nothing, which who reads it names
            if not stat.S_ISREG(mode):
                raise RunDirectoryError(f"{file}: is a pipe, a device or a socket, and no run has one. Remove it.")


def remove_empty(folders: list[Path]) -> None:
    """Remove directories, the last first, until one is not empty."""
    for folder in reversed(folders):
        try:
            folder.rmdir()
        except OSError:
            break


def remove_at_once(directory: Path) -> None:
    """Remove a directory so that a kill leaves no half of it under its name.

    Of a link the link alone.
    """
    forge_dist.check_guards(directory)
    if directory.is_symlink() or not directory.is_dir():
        directory.unlink()
        return
    hidden = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    directory.rename(hidden)
    shutil.rmtree(hidden)


def last_export(path: str) -> str:
    """Return a run's export with the most samples; any other path as it is."""
    run = Path(path).expanduser()
    try:
        if not (run / "config.yaml").exists():
            return path
        done = [entry for entry in run.glob("hf_format/samples_*") if entry.name.removeprefix("samples_").isdigit()]
    except OSError:
        return path  # not a run: loading it raises the right error
    if not done:
        raise SettingsError(f"{path}: this run has no export yet in hf_format/. Let it finish, or name a model directory.")
    return str(max(done, key=lambda entry: int(entry.name.removeprefix("samples_"))))


def run_values(run: Path) -> dict[str, Any]:
    """Return every setting of a run as it was resolved.

    Raises:
        SettingsError: its config.yaml is missing or is not what a run writes.

    """
    file = run / "config.yaml"
    try:
        found = values_in(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(getattr(error, "strerror", None) or error).split())
        raise SettingsError(f"{file}: cannot be read: {reason}. A run directory has one; put it back.") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_path"), str):
        raise SettingsError(f"{file}: is not what a run writes: it holds no settings, or no model_path. Put it back.")
    return found


def trained_for(directory: str | Path) -> str | None:
    """Return the `qat` of the run in whose hf_format/ a directory lies; None without one."""
    folder = Path(directory).expanduser().absolute()
    run = folder.parent.parent
    if folder.parent.name != "hf_format" or not (run / "config.yaml").is_file():
        return None
    try:
        found = run_values(run).get("qat")
    except SettingsError:
        return None  # another program's config.yaml
    return found if isinstance(found, str) else None
