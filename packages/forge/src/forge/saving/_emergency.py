"""Run directory → its own folder in emergency_dir, which copies of the run do not share.

`emergency_dir/forge-RUN-PLACE/` holds a full state (`step_90/`, `latest`) and owner.json, which names the run directory.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import forge_dist
from forge._errors import SettingsError
from forge.saving._directories import remove_empty

_OWNER = "owner.json"


def emergency_place(folder: str | None, path: Path, run: str) -> Path | None:
    """Return the folder of a run directory in emergency_dir; None where that is not set.

    Copies of a run directory share the run's identity, so the directory's own path is part of the name.
    """
    place = hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:8]
    return None if folder is None else Path(folder) / f"forge-{run}-{place}"


def check_emergency_dir(folder: str, path: Path, run: str, note: Callable[[str], None]) -> None:
    """Write to emergency_dir and leave nothing there, before it is needed.

    Where it holds a state of the run, which is gone on from, that it cannot be written is a warning.

    Raises:
        SettingsError: it cannot be written.

    """
    there = Path(folder)
    missing = [part for part in reversed((there, *there.parents)) if not os.path.lexists(part)]
    try:
        there.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        closed = forge_dist.unreadable(there)
        why = f"{error.strerror or error}{'' if closed is None else f' ({closed})'}"
        said = f"emergency_dir {folder}: cannot be written: {why}. A full state goes there when ckpt_output_dir takes none"
        place = emergency_place(folder, path, run)
        if closed is None and place is not None and place.is_dir():
            note(f"WARNING: {said}. The one that is there is read, and no other will be written")
            return
        raise SettingsError(f"{said}: give a directory that this user may write to, or leave emergency_dir out.") from error
    finally:
        remove_empty([part for part in missing if part.is_dir()])


def claim(place: Path, path: Path) -> None:
    """Record the run directory of a folder in emergency_dir.

    Where that cannot be written, nor can the state that follows, which is reported.
    """
    with suppress(OSError, forge_dist.ExportError):
        place.mkdir(parents=True, exist_ok=True)
        forge_dist.write_text_atomically(place / _OWNER, json.dumps({"ckpt_output_dir": os.path.realpath(path)}))


def disown(place: Path) -> None:
    """Remove a folder in emergency_dir in which no state is, for none found room."""
    with suppress(OSError):
        if not any(place.glob("step_*")):
            shutil.rmtree(place)


def adopt(place: Path, path: Path) -> bool:
    """Return whether the run directory has a folder in emergency_dir.

    One of before the directory was moved becomes it. A directory that is still there with the same run is another copy,
    whose folder stays its own.
    """
    if place.is_dir():
        return True
    run = place.name.rpartition("-")[0]
    for other in sorted(place.parent.glob(f"{run}*")):
        if run not in (other.name, other.name.rpartition("-")[0]):
            continue
        try:
            owner = json.loads((other / _OWNER).read_text(encoding="utf-8"))["ckpt_output_dir"]
        except FileNotFoundError:
            owner = None  # an earlier version recorded none
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if owner is not None and (known := _run_in(Path(str(owner)))) is not None and known == _run_in(path):
            continue
        with suppress(OSError):  # of two at once, one
            other.rename(place)
            claim(place, path)
            return True
    return False


def _run_in(path: Path) -> str | None:
    """Return the identity of the run in a directory; None where it has none."""
    try:
        return str(json.loads((path / "run.json").read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
