"""Snapshot at a URL → the run directory that it is of, each file compared by its SHA-256."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from forge._errors import StorageError
from forge.locking._run_lock import is_record
from forge.storage._remote import Remote
from forge.storage._snapshot import Snapshot

RESTORING = ".forge-restoring"
"""Hidden folder of a run directory that is restored."""


def restore(remote: Remote, snapshot: Snapshot, run: Path, progress: Callable[[int, int], None]) -> None:
    """Fetch a run into an empty directory; config.yaml, which makes it a run, comes last.

    Args:
        remote: the URL.
        snapshot: what is fetched.
        run: the directory, which holds nothing that the snapshot names.
        progress: called with the bytes that were fetched, and all.

    Raises:
        StorageError: a file is missing or not the one that was copied; nothing of it is left.

    """
    staging = run / RESTORING
    shutil.rmtree(staging, ignore_errors=True)
    total, done = sum(file.bytes for file in snapshot.files.values()), 0

    def fetched(size: int) -> None:
        nonlocal done
        done += size
        progress(done, total)

    try:
        for path, file in snapshot.files.items():
            target = staging / path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                found = remote.fetch(file.at, target, fetched)
            except FileNotFoundError:
                found = None
            if found != (file.bytes, file.sha256):
                what = "is missing" if found is None else "is not what was copied to it"
                raise StorageError(
                    f"checkpoint_storage {remote.url}: {file.at} {what}, and {snapshot} needs it. Put it back, or give another "
                    "checkpoint_storage."
                )
            # By its time it is known not to have changed since it was copied.
            os.utime(target, ns=(file.modified, file.modified))
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    for entry in sorted(staging.iterdir(), key=lambda entry: entry.name == "config.yaml"):
        entry.rename(run / entry.name)
    staging.rmdir()


def remove_half(run: Path) -> bool:
    """Remove what a kill left of a half-fetched run; return whether there was something."""
    staging = run / RESTORING
    if not staging.exists():
        return False
    if not (run / "config.yaml").exists():
        for entry in run.iterdir():
            if entry.name not in (RESTORING, "logs") and not is_record(entry.name):
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    shutil.rmtree(staging)
    return True
