"""Parts of a stored teacher → a directory of `forge teach`, by one command at a time."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from forge._disk import write_remedy
from forge._errors import RunWriteError, SettingsError
from forge.locking._run_lock import RunLock
from forge.tasks.items._stored_teacher import RECORD, Part, part_file, part_key, write_part, write_record

_TOLD = ("teacher", "top_k", "temperature")
"""What teacher.json has of the settings of `forge teach`."""


class TeacherOutput:
    """The directory, which one command at a time writes to; without a part it is as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._key = folder, ""
        self._about: dict[str, Any] = {}
        self._made = not folder.exists()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunWriteError(f"output {folder} cannot be made: {error}; {write_remedy(error)}.") from error
        self._lock = RunLock(
            folder, name="output", busy="another command writes to it now", remedy="Wait for that, or give another directory."
        )

    def __enter__(self) -> Self:
        self._lock.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        if self._made:
            with contextlib.suppress(OSError):
                self.folder.rmdir()  # which takes none but an empty one

    def begin(self, computed_of: Any, about: Mapping[str, Any]) -> list[int]:
        """Return the numbers of the parts that are not there.

        Args:
            computed_of: all that the parts follow from, as JSON.
            about: what teacher.json says, `parts` among it: how many there are.

        Raises:
            SettingsError: the directory is of other parts, or holds other files.

        """
        self._key = hashlib.sha256(json.dumps(computed_of, sort_keys=True).encode()).hexdigest()
        record = self.folder / RECORD
        if not record.exists() and any(not each.name.startswith(".") for each in self.folder.iterdir()):
            raise SettingsError(f"output {self.folder}: holds other files. Give a directory that is empty or not there.")
        if record.exists() and _key_of(record) != self._key:
            raise SettingsError(
                f"output {self.folder}: holds what was computed {_otherwise(record, about)}. Remove it, or give another output."
            )
        self._about = {"key": self._key, **about}
        return [number for number in range(about["parts"]) if part_key(part_file(self.folder, number)) != self._key]

    def write(self, number: int, part: Part) -> None:
        """Write a part, and teacher.json before the first one.

        Raises:
            RunTakenOverError: another command writes to the directory now.

        """
        write_part(part_file(self.folder, number), part, self.start())

    def start(self) -> str:
        """Write teacher.json, if it is not written; return the key of the parts.

        Raises:
            RunTakenOverError: another command writes to the directory now.
        """
        self._lock.check()
        if self._about:
            write_record(self.folder, self._about)
            self._about = {}
        return self._key


def _key_of(record: Path) -> Any:
    """Return the key in teacher.json; None where it cannot be read."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))["key"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _otherwise(record: Path, about: Mapping[str, Any]) -> str:
    """Say what teacher.json has otherwise; what it does not have is how rows are read."""
    try:
        was = json.loads(record.read_text(encoding="utf-8"))
        differ = [f"{name} {was[name]} (now {about[name]})" for name in _TOLD if was[name] != about[name]]
    except (OSError, ValueError, LookupError, TypeError):
        differ = []
    return f"with {', '.join(differ)}" if differ else "from other rows, rows read otherwise, or other weights of the teacher"
