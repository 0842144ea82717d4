"""metrics.jsonl, as it grows → its lines, each once, also those that a resume repeats."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_WHEN = ("step", "time")


class Record:
    """Reader of the lines that a run appends to metrics.jsonl.

    A run that is resumed makes steps again that were behind its last full state, and their lines with them. They say the same,
    so they are known by what they measure and the step that they are of, and not by where they stand in the file.

    Args:
        file: metrics.jsonl of a run, which may not be there yet.
        seen: for each kind of line the last step that needs no reading.

    """

    def __init__(self, file: Path, seen: Mapping[str, int] | None = None) -> None:
        self._file = file
        self.seen = dict(seen or {})
        """Kind of line → the last step that was read."""
        self._at = (0, 0)

    def new(self) -> Iterator[dict[str, Any]]:
        """Yield the lines that are new; one counts as seen once the next is asked for."""
        try:
            handle = self._file.open("rb")
        except FileNotFoundError:
            return
        with handle:
            found = os.fstat(handle.fileno())
            # A resumed run puts a shorter file in the place of the former.
            offset = self._at[1] if self._at[0] == found.st_ino and self._at[1] <= found.st_size else 0
            handle.seek(offset)
            for line in handle:
                if not line.endswith(b"\n"):
                    return  # it is being written
                values = _parsed(line)
                kind, step = kind_of(values), values.get("step")
                if isinstance(step, int) and step > self.seen.get(kind, -1):
                    yield values
                    self.seen[kind] = step
                offset += len(line)
                self._at = (found.st_ino, offset)


def kind_of(values: Mapping[str, Any]) -> str:
    """Name what a line measures: its first key beside step and time."""
    return next((name for name in values if name not in _WHEN), "")


def figures(values: Mapping[str, Any]) -> dict[str, float]:
    """Flatten a line to its finite numbers: of lists and mappings as `name/0` and `name/key`."""
    found: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, Mapping):
            for key, each in value.items():
                add(f"{name}/{key}", each)
        elif isinstance(value, list):
            for number, each in enumerate(value):
                add(f"{name}/{number}", each)
        elif isinstance(value, (int, float)) and math.isfinite(value):
            found[name] = int(value) if isinstance(value, bool) else value

    for name, value in values.items():
        if name not in _WHEN:
            add(name, value)
    return found


def _parsed(line: bytes) -> dict[str, Any]:
    """Read a line; an empty object where a full disk tore it."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
