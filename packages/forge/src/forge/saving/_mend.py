"""Damaged files of a run's exports → taken from other exports of the run that hold the same."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping
from pathlib import Path

import forge_dist
from forge._disk import write_remedy
from forge._errors import RunDirectoryError
from forge.saving._hashes import FOLDER, Hashes, damaged_files, known_hashes, not_a_directory


def mend_exports(run: Path) -> tuple[list[str], list[str]]:
    """Verify recorded exports by their hashes; take damaged files from others.

    Returns:
        A line for each file that was taken, and one for each that stays damaged.

    """
    known, damaged = known_hashes(run), {}
    for name, files in known.items():
        if (other := not_a_directory(run / FOLDER / name)) is not None:
            damaged[name] = {"": other}
        elif (run / FOLDER / name).is_dir():
            forge_dist.doing(f"verifying {FOLDER}/{name}")
            if found := damaged_files(run / FOLDER / name, files):
                damaged[name] = found
    try:
        taken = take_twins(run, damaged, known)
    except RunDirectoryError as error:  # no room: what is damaged stays so, and training is not ended by it
        return [], [*_lines(damaged, ()), str(error)]
    mended = [f"{FOLDER}/{name}/{file}: taken from {source}, for {damaged[name][file]}" for name, file, source in taken]
    return mended, _lines(damaged, {(name, file) for name, file, _ in taken})


def take_twins(run: Path, damaged: Mapping[str, Mapping[str, str]], known: Mapping[str, Hashes]) -> list[tuple[str, str, str]]:
    """Take damaged files from exports that have the same; return (export, file, source).

    Args:
        run: the run directory.
        damaged: export → file → what is wrong with it; the file "" for all of the export.
        known: export → its hashes.

    Raises:
        RunDirectoryError: a file cannot be written.

    """
    taken = []
    for name, files in damaged.items():
        if not_a_directory(run / FOLDER / name) is not None:
            continue
        wanted = known.get(name, {})
        for file in wanted if "" in files else files:
            for other in sorted(known):
                twin = run / FOLDER / other / file
                same = other != name and known[other].get(file) == wanted[file]
                if same and forge_dist.file_damage(twin, *wanted[file]) is None:
                    put_file(twin, run / FOLDER / name / file)
                    taken.append((name, file, f"{FOLDER}/{other}"))
                    break
    return taken


def put_file(source: Path, target: Path) -> None:
    """Copy a file to its place; a kill on the way leaves what was there.

    Raises:
        RunDirectoryError: it cannot be written.

    """
    half = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, half)
        with half.open("rb") as written:
            os.fsync(written.fileno())
        half.replace(target)
    except IsADirectoryError as error:
        raise RunDirectoryError(
            f"{target}: is a directory, and a file was exported there. Move it away, and repair again."
        ) from error
    except OSError as error:
        raise RunDirectoryError(
            f"{target}: cannot be written: {error.strerror or error}. Repair again after that: {write_remedy(error)}."
        ) from error
    finally:
        half.unlink(missing_ok=True)


def _lines(damaged: Mapping[str, Mapping[str, str]], mended: Collection[tuple[str, str]]) -> list[str]:
    left = ((name, fault) for name, files in damaged.items() for file, fault in files.items() if (name, file) not in mended)
    return [f"{FOLDER}/{name}: {fault}" for name, fault in left]
