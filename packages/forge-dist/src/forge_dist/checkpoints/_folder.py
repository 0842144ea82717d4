"""The directory of full states: names, atomic completion, deletion.

::

    full_state/
    ├── step_40/  step_80/        whole full states
    ├── latest                    names the one that was finished last, for people and scripts
    ├── .step_120.*.tmp           being written, or left by a killed run
    ├── .step_40.*.pruned         being deleted
    └── .step_80.*.replaced       was step_80 until a new step_80 took its name

Only whole directories ever have a plain name: they are renamed to it once everything is on the disk, and from it before
anything is deleted. One process does all of this: the first rank of the one run that owns the directory.
"""

import operator
import os
import re
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from forge_dist._errors import ExportError
from forge_dist._files import check_guards, write_text_atomically
from forge_dist.checkpoints._manifest import MANIFEST, Manifest

LATEST = "latest"
_NAME = re.compile(r"step_(\d+)")
_LEFTOVER = re.compile(r"\.(step_\d+)\.[0-9a-f]+\.(tmp|pruned|replaced)|\.latest\..*\.tmp")


def name_of(step: int) -> str:
    """Return the name of the full state of `step`."""
    return f"step_{step}"


def whole_step(step: Any) -> tuple[int, str | None]:
    """Return a step as an int, and what is wrong with it (the step is then -1)."""
    try:
        if not isinstance(step, bool):
            return operator.index(step), None
    except TypeError:
        pass
    return -1, f"the step of a full state is a whole number from 0, not {step!r}"


def step_of(path: Path) -> int | None:
    """Return the step in a directory's name, or None."""
    match = _NAME.fullmatch(path.name)
    return None if match is None else int(match[1])


def listed(root: Path) -> list[Path]:
    """Return the full states under `root`, whole or not, the latest step first."""
    if not root.is_dir():
        return []
    found = [(step, path) for path in root.iterdir() if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def tidy(root: Path) -> None:
    """Delete what a killed run left half-written or half-deleted.

    A full state that was to be replaced gets its name back.
    """
    if not root.is_dir():
        return
    for path in list(root.iterdir()):
        match = _LEFTOVER.fullmatch(path.name)
        if match is None:
            continue
        if match[2] == "replaced" and not (root / match[1]).exists():
            path.rename(root / match[1])
        elif path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def begin(root: Path, step: int) -> Path:
    """Create the temporary directory that the ranks write into.

    Raises:
        OSError: it cannot be created.
    """
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / _hidden(step, "tmp")
    temporary.mkdir()
    return temporary


def finish(temporary: Path, root: Path, manifest: Manifest) -> Path:
    """Write the manifest and rename the directory to its final name.

    The ranks' files are durable already.

    Raises:
        OSError: one of these failed; the final name refers to what it did before.
    """
    target = root / name_of(manifest.step)
    with open(temporary / MANIFEST, "x", encoding="utf-8") as file:
        file.write(manifest.to_text())
        file.flush()
        os.fsync(file.fileno())
    _sync(temporary)
    check_guards(target)
    replaced = None
    if target.exists():
        # No portable call swaps two directories. A kill between the two renames is undone by tidy().
        replaced = root / _hidden(manifest.step, "replaced")
        target.rename(replaced)
    try:
        temporary.rename(target)
    except OSError:
        if replaced is not None:
            replaced.rename(target)
        raise
    _sync(root)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)
    return target


def discard(temporary: Path) -> None:
    """Delete a temporary directory; what cannot be deleted is left to `tidy`."""
    shutil.rmtree(temporary, ignore_errors=True)


def announce(root: Path, target: Path) -> str | None:
    """Write the name of `target` to `latest`; return what went wrong, or None."""
    try:
        write_text_atomically(root / LATEST, target.name + "\n")
    except ExportError as error:
        return str(error)
    return None


def prune(root: Path, newest: Path, keep: int, broken: Iterable[Path]) -> str | None:
    """Delete all full states but `newest` and the `keep - 1` before it.

    Broken ones do not count and are deleted, and so are those of later steps: the run went back.

    Returns:
        What went wrong, or None.
    """
    step, useless = step_of(newest), {path.name for path in broken}
    older = [path for path in listed(root) if path.name not in useless and _before(path, step)]
    kept = {newest.name, *(path.name for path in older[: keep - 1])}
    problems = []
    for path in listed(root):
        if path.name in kept:
            continue
        try:
            delete(path)
        except OSError as error:
            problems.append(f"{path} cannot be removed: {error}")
    return "; ".join(problems) or None


def delete(path: Path) -> None:
    """Delete a full state; a kill on the way leaves no half of it under its name.

    Of a link the link alone.

    Raises:
        OSError: it cannot be renamed or deleted.
    """
    check_guards(path)
    if path.is_symlink() or not path.is_dir():
        path.unlink()
        return
    hidden = path.with_name(_hidden(step_of(path) or 0, "pruned"))
    path.rename(hidden)
    shutil.rmtree(hidden)


def _before(path: Path, step: int | None) -> bool:
    own = step_of(path)
    return own is not None and step is not None and own < step


def _hidden(step: int, kind: str) -> str:
    return f".{name_of(step)}.{secrets.token_hex(4)}.{kind}"


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
