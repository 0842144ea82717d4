"""What a tracker was sent → RUN/trackers/NAME.json, and back for the next start."""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs


@attrs.define(kw_only=True)
class Sent:
    """What a tracker has of a run."""

    sent: dict[str, int] = attrs.field(factory=dict)
    """Kind of line in metrics.jsonl → the last step of that kind that was sent."""
    lines: int = 0
    """How many lines were sent."""
    settings: bool = False
    """Whether the settings were sent."""
    error: str | None = None
    """Why the last attempt failed; None once one succeeded."""


def state_file(run: Path, name: str) -> Path:
    """Return the file that says what a tracker was sent."""
    return run / "trackers" / f"{name}.json"


def read_sent(run: Path, name: str) -> Sent:
    """Read what a tracker was sent: nothing where the file is missing or not a run's."""
    try:
        return Sent(**json.loads(state_file(run, name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return Sent()


def write_sent(run: Path, name: str, sent: Sent) -> None:
    """Replace the file at once; not made durable, for a line is sent again at worst."""
    file = state_file(run, name)
    hidden = file.with_name(f".{file.name}.{os.getpid()}.tmp")
    hidden.write_text(json.dumps(attrs.asdict(sent)) + "\n", encoding="utf-8")
    hidden.replace(file)
