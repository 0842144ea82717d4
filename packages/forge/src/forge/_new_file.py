"""Text of a command → a file that was not there before."""

from __future__ import annotations

import os
from pathlib import Path

import forge_dist
from forge._errors import RunDirectoryError


def write_new_file(file: str | Path, text: str, *, argument: str = "") -> Path:
    """Write a file that must not exist, and return its path.

    Args:
        file: the file; `~` is expanded.
        text: its content.
        argument: what messages name before it, such as `output=`.

    Raises:
        RunDirectoryError: it exists, or cannot be written.

    """
    target = Path(file).expanduser()
    if os.path.lexists(target):
        raise RunDirectoryError(f"{argument}{target}: exists already, and nothing is written over it. Give another file.")
    if not target.parent.is_dir():
        what = "is no directory" if os.path.lexists(target.parent) else "does not exist"
        raise RunDirectoryError(
            f"{argument}{target}: cannot be written: {target.parent} {what}. Make that directory, or give another file."
        )
    try:
        forge_dist.write_text_atomically(target, text)
    except forge_dist.ForgeDistError as error:
        raise RunDirectoryError(f"{f'{argument}{target}: ' if argument else ''}{error}. Give another file.") from error
    return target
