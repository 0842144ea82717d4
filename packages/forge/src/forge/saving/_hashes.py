"""Exports of a run → size and SHA-256 of each of their files, recorded when they were made.

They stand in hf_format/hashes.json, and once more in the event of each export, from which a lost record is written again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import forge_dist
from forge._sealed import sealed, unsealed

FOLDER = "hf_format"
"""Folder of the exports in a run directory."""
FILE = "hashes.json"
REPLACED = ".replaced"
"""End of the hidden name of an export that another one takes the place of."""
_THREADS = 4  # hashing releases the GIL; more than this and the disk is the limit

NO_THREAD = "can't start new thread"
"""What Python says where a thread cannot be started."""
Hashes = dict[str, tuple[int, str]]
"""Path of a file in an export → its bytes and its SHA-256."""


def hash_export(directory: Path, ranks: forge_dist.Ranks | None = None) -> Hashes:
    """Hash the files of an export; with `ranks`, collective: each rank reads its share of them.

    Raises:
        OSError: a file cannot be read.

    """
    names = sorted(file.relative_to(directory).as_posix() for file in directory.rglob("*") if file.is_file())
    mine = names if ranks is None else names[ranks.rank :: ranks.world_size]
    found: Hashes = dict(zip(mine, _each(lambda name: forge_dist.file_hash(directory / name), mine), strict=True))
    if ranks is None or ranks.world_size == 1:
        return found
    return {name: tuple(about) for part in ranks.gather(found) for name, about in sorted(part.items())}


def read_hashes(run: Path) -> dict[str, Hashes]:
    """Return export → its hashes.

    Raises:
        FileNotFoundError: nothing was recorded, or the record is gone.
        ValueError: the record is damaged; the message says how.
        OSError: it cannot be read.

    """
    values, _ = unsealed(run / FOLDER / FILE)
    try:
        return {_export_name(name): _hashes(files) for name, files in values.items()}
    except (TypeError, ValueError, AttributeError):
        raise ValueError("is not what a run writes") from None


def hashes_in_events(run: Path) -> dict[str, Hashes]:
    """Return export → its hashes, from the last event of each export."""
    found = {}
    for event in events(run, "exported"):
        with suppress(TypeError, ValueError, AttributeError, KeyError):
            found[_export_name(event["export"])] = _hashes(event["files"])
    return found


def known_hashes(run: Path) -> dict[str, Hashes]:
    """Return export → its hashes, from the record, or from the events without a whole one."""
    try:
        return read_hashes(run)
    except (OSError, ValueError):
        return hashes_in_events(run)


def record_hashes(run: Path, export: str, files: Hashes | None) -> None:
    """Add an export to the record, or take it out; those that are not there any more leave it.

    Raises:
        forge_dist.ExportError: it cannot be written; the former record is still there.

    """
    others = {name: of for name, of in known_hashes(run).items() if name != export}
    write_hashes(run, others if files is None else {**others, export: files})


def write_hashes(run: Path, known: Mapping[str, Hashes]) -> None:
    """Write the record of the exports that are there. Raises forge_dist.ExportError."""
    (run / FOLDER).mkdir(exist_ok=True)
    folder = run / FOLDER
    there = {
        name: files
        for name, files in sorted(known.items())
        # What somebody put in the place of an export does not take it out: it is damage.
        if os.path.lexists(folder / name) or (folder / f".{name}{REPLACED}").is_dir()
    }
    forge_dist.write_text_atomically(run / FOLDER / FILE, sealed(there))


def damaged_files(directory: Path, files: Hashes) -> dict[str, str]:
    """Return file → what is wrong with it, for those of an export that are not as recorded."""
    faults = _each(lambda name: forge_dist.file_damage(directory / name, *files[name]), files)
    return {name: fault for name, fault in zip(files, faults, strict=True) if fault is not None}


def _each(work: Callable[[str], Any], names: Collection[str]) -> list[Any]:
    """Return what `work` gives for each name, in threads where some can be started."""
    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            return list(threads.map(work, names))
    except RuntimeError as error:
        # Python says this where there is no memory for a thread's stack, or no process more is allowed: the model of a
        # finished run is written, and reading it needs neither.
        if NO_THREAD not in str(error):
            raise
        return [work(name) for name in names]


def not_a_directory(directory: Path) -> str | None:
    """Return what is wrong with something else in the place of an export, or None."""
    if directory.is_dir() or not os.path.lexists(directory):
        return None
    what = "a file" if directory.exists() else "a link to nothing"
    return f"{directory.name} is {what}, and a directory was exported there; move it away first"


def events(run: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """Yield the events of these kinds in their order; a torn line is left out."""
    try:
        lines = (run / "events.jsonl").read_bytes().splitlines()
    except OSError:
        return
    for line in lines:
        with suppress(ValueError, RecursionError):
            found = json.loads(line)
            if isinstance(found, dict) and found.get("event") in kinds:
                yield found


def _export_name(name: Any) -> str:
    """Return the name of an export.

    Raises:
        ValueError: it would be another place than a folder in hf_format.

    """
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
        raise ValueError(name)
    return name


def _hashes(files: Any) -> Hashes:
    """Check what was recorded of an export: a run directory may come from somebody else.

    Raises:
        TypeError, ValueError, AttributeError: it is not what a run writes, or a name leads out of the export.

    """
    found = {}
    for name, (size, sha256) in files.items():
        if not isinstance(size, int) or not isinstance(sha256, str):
            raise TypeError(name)
        parts = str(name).split("/")
        if "\0" in name or any(part in ("", ".", "..") for part in parts):
            raise ValueError(name)
        found[str(name)] = (size, sha256)
    return found
