"""Interface of trackers: a run → what it is sent to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import attrs


class Tracker(Protocol):
    """What a run is sent to; accelerate's `GeneralTracker` has these methods."""

    def start(self) -> None:
        """Open the run at the tracker, or the same one again."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Send the settings, once a run: numbers, strings, true and false."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Send the figures of one line of metrics.jsonl."""

    def finish(self) -> None:
        """Send what is still held back, and close."""


@attrs.frozen(kw_only=True)
class TrackedRun:
    """What a tracker is made of."""

    directory: Path
    """The run directory. A tracker's own files belong into `trackers/` there."""
    id: str
    """Identity of the run, the same at each start: with it a tracker goes on where it was."""
    settings: Mapping[str, str | None]
    """Settings of the trackers, such as `wandb_project`."""
    num_steps: int | None = None
    """Steps that the run will make; None where that is not known."""

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.directory.name

    @property
    def files(self) -> Path:
        """Folder of the trackers' own files."""
        return self.directory / "trackers"
