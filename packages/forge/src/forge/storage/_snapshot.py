"""Record of a run directory at one moment: its files, and where each one's bytes are.

::

    URL/
    ├── storage.json                 which run this is, and which process copies it now
    ├── snapshots/000012.json        written last: names every file of the run directory, its bytes and SHA-256
    ├── full_state/step_40/          files that never change lie where the run directory has them
    ├── hf_format/samples_80/
    ├── data/  plan/  run.json ...
    └── versions/000012/             what changed since it was first copied: metrics.jsonl, log.txt, ...

A file that a snapshot names is never written again, so that a kill at any moment leaves the newest snapshot whole.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import attrs

from forge._counted import counted
from forge._errors import StorageError
from forge.storage._remote import Remote

FOLDER = "snapshots"
HOLDER = "storage.json"
_NAME = re.compile(rf"{FOLDER}/(\d{{6,}})\.json")
_STATE = re.compile(r"full_state/step_(\d+)/.")
_FORMAT = 1


@attrs.frozen(kw_only=True)
class StoredFile:
    """One file of a run directory, as it was copied."""

    at: str
    """Name below the URL."""
    bytes: int
    sha256: str
    modified: int
    """Time of the local file's last change, in nanoseconds: by it and its size it is known again."""


@attrs.frozen(kw_only=True)
class Snapshot:
    """Every file of a run directory at one moment."""

    number: int
    run: str
    """Identity of the run, as in its run.json."""
    files: Mapping[str, StoredFile]
    """Path in the run directory → the copied file."""

    @property
    def step(self) -> int | None:
        """Step of its newest full state; None without one."""
        return newest_step(self.files)

    @property
    def resumable(self) -> bool:
        """Whether a run can be resumed from it, or is finished in it."""
        return self.step is not None or "result.json" in self.files

    @property
    def name(self) -> str:
        """Name of its file below the URL."""
        return f"{FOLDER}/{self.number:06}.json"

    def to_bytes(self) -> bytes:
        """Return the content of its file."""
        files = {path: attrs.asdict(file) for path, file in sorted(self.files.items())}
        return (json.dumps({"format": _FORMAT, "run": self.run, "files": files}, indent=1) + "\n").encode()

    def __str__(self) -> str:
        total = sum(file.bytes for file in self.files.values())
        what = "a finished run" if "result.json" in self.files else f"the run up to step {self.step}"
        return f"{what} ({counted(len(self.files), 'files')}, {total / 2**20:,.1f} MiB)"


def newest_step(paths: Mapping[str, object]) -> int | None:
    """Return the latest step of which the paths of a run directory have a full state."""
    return max((int(found[1]) for path in paths if (found := _STATE.match(path))), default=None)


def snapshots(remote: Remote, names: Mapping[str, int]) -> list[Snapshot]:
    """Return the snapshots that are whole records, the newest first.

    Raises:
        StorageError: one was written by a later version, or names files outside of a run directory; or none is whole.

    """
    numbers = sorted((int(found[1]) for name in names if (found := _NAME.fullmatch(name))), reverse=True)
    found = []
    for number in numbers:
        name = f"{FOLDER}/{number:06}.json"
        try:
            about = json.loads(remote.read(name))
        except (ValueError, FileNotFoundError):
            continue  # a kill left half of it, or its process removes it now
        found.append(_snapshot(remote, name, number, about))
    # A kill leaves half of the newest alone, and of the first one nothing is lost: the one before it goes only afterwards.
    if not found and max(numbers, default=0) > 1:
        raise StorageError(
            f"checkpoint_storage {remote.url}: {FOLDER}/{max(numbers):06}.json is damaged, and no other snapshot is there. Put "
            "it back, or give another checkpoint_storage: a run that began anew would remove what is copied there."
        )
    return found


def _snapshot(remote: Remote, name: str, number: int, about: Any) -> Snapshot:
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise StorageError(
            f"checkpoint_storage {remote.url}: {name} is not of format {_FORMAT}, which this version reads: resume with the "
            "version that wrote it, or give another checkpoint_storage."
        )
    try:
        files = {path: StoredFile(**file) for path, file in about["files"].items()}
        for path, file in files.items():
            if [*map(type, attrs.astuple(file))] != [str, int, str, int]:
                raise TypeError(path)
        found = Snapshot(number=number, run=str(about["run"]), files=files)
    except (KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"checkpoint_storage {remote.url}: {name} is not what a run writes ({error!r}): give another checkpoint_storage."
        ) from error
    for path in [*files, *(file.at for file in files.values())]:
        parts = PurePosixPath(path).parts
        if not parts or ".." in parts or PurePosixPath(path).is_absolute():
            raise StorageError(f"checkpoint_storage {remote.url}: {name} names {path!r}, which is no file of a run directory.")
    return found


_LEFT_OUT = frozenset({"logs", "exports", "evals", "report.html"})
"""Entries of a run directory that a resumed run does not need."""
_WHOLE = ("full_state", "hf_format")
"""Folders whose own folders are there once they are complete."""
_GROWING = (".jsonl", ".txt")


def local_files(run: Path) -> dict[str, tuple[int, int]]:
    """Return bytes and time of the last change of each file of a run directory that is copied.

    Left out are hidden files, links, and hf_format/best until best.json says which step it is of.
    """
    found: dict[str, tuple[int, int]] = {}

    def walk(folder: Path) -> None:
        for entry in sorted(folder.iterdir()):
            path = entry.relative_to(run).as_posix()
            if entry.name.startswith(".") or entry.is_symlink() or path in _LEFT_OUT or not _settled(run, path):
                continue
            try:
                if not entry.is_dir():
                    stat = entry.stat()
                    found[path] = (stat.st_size, stat.st_mtime_ns)
                    continue
                before = entry.stat().st_ino
                walk(entry)
                whole = entry.stat().st_ino == before
            except FileNotFoundError:
                whole = False
            if not whole:  # it was pruned or replaced meanwhile: the next look finds what is there then
                for gone in [name for name in found if name == path or name.startswith(f"{path}/")]:
                    del found[gone]

    walk(run)
    return found


def links_of(run: Path) -> list[Path]:
    """Return the links in a run directory and its folders; they are not copied."""
    folders = [run, *(run / name for name in ("full_state", "hf_format") if not (run / name).is_symlink())]
    return [entry for folder in folders if folder.is_dir() for entry in folder.iterdir() if entry.is_symlink()]


def grows(path: str) -> bool:
    """Return whether a file of a run directory is appended to, line by line."""
    return path.endswith(_GROWING) and not path.startswith((*(f"{folder}/" for folder in _WHOLE), "data/"))


def group_of(path: str) -> str:
    """Return the folder that a file is complete with (full_state/step_N), or an empty text."""
    parts = path.split("/")
    return "/".join(parts[:2]) if len(parts) > 2 and parts[0] in _WHOLE else ""


def _settled(run: Path, path: str) -> bool:
    """Return whether the mark of the best export is of the export that is there.

    A better one takes its place only once the former mark is gone (`forge.saving`); no clock is asked, which may be set back.
    """
    if path not in ("hf_format/best", "hf_format/best.json"):
        return True
    return (run / "hf_format" / "best").is_dir() and (run / "hf_format" / "best.json").is_file()
