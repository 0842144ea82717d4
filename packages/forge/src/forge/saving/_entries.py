"""Entries of a run directory: files and folders, and those that come before training."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from forge._errors import RunDirectoryError
from forge.saving._exports import MARK
from forge.saving._hashes import FILE as HASHES, FOLDER as EXPORTS
from forge.saving._inputs import FILE as INPUTS

GROWING = ("log.txt", "metrics.jsonl", "events.jsonl")
"""Files that are appended to while the run goes on."""
PREPARED = frozenset({"adapter", "base_model", "data", "plan", "osft", INPUTS, "run.json", "memory.json", *GROWING})
"""What is there before training begins."""
REPLACED = (
    *("full_state", EXPORTS, "rollouts", "samples", "trackers", "answers.jsonl", "report.html"),
    *("config.yaml", *sorted(PREPARED)),
)
"""What is removed of a run that is replaced, in this order: until config.yaml it is a run, then what a kill may leave."""
PLAN = "plan/plan.npz"
WRITTEN = ("data", "plan", "osft", EXPORTS, "rollouts", "samples")
"""Folders with files that are written under a hidden name first."""
_FILES = frozenset(
    {
        *("config.yaml", "result.json", INPUTS, "run.json", "memory.json", "answers.jsonl", "report.html"),
        *(PLAN, f"{EXPORTS}/{HASHES}", f"{EXPORTS}/{MARK}", *GROWING),
    }
)
_FOLDERS = frozenset(
    {"adapter", "base_model", "data", "plan", "osft", "full_state", EXPORTS, "rollouts", "samples", "trackers"}
)


def check_kinds(run: Path, held: Collection[str]) -> None:
    """Raise RunDirectoryError where a file of the run is a directory, or a directory a file.

    `held` are the names in the directory itself.
    """
    for name in (*held, *(name for name in _FILES.difference(held) if os.path.lexists(run / name))):
        entry = run / name
        for names, right, here, there in (
            (_FILES, entry.is_file, "directory", "file"),
            (_FOLDERS, entry.is_dir, "file", "directory"),
        ):
            if name in names and not right():
                found = f"a {here}" if entry.exists() else "a link to nothing"
                raise RunDirectoryError(
                    f"{entry}: is {found}, and a run has a {there} of that name. Put it back, or remove what is there."
                )
