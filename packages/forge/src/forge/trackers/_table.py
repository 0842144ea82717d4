"""Names of trackers → what makes them: a row for each that is built in, and those of entry points."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import attrs

from forge._errors import SettingsError

GROUP = "forge.trackers"
"""Entry-point group; a name is one of the setting `trackers`, its value a function of a `TrackedRun`."""

_BUILT_IN = {
    "wandb": (EntryPoint("wandb", "forge.trackers._built_in:wandb", GROUP), "wandb"),
    "mlflow": (EntryPoint("mlflow", "forge.trackers._built_in:mlflow", GROUP), "mlflow"),
    "tensorboard": (EntryPoint("tensorboard", "forge.trackers._built_in:tensorboard", GROUP), "tensorboard"),
    "trackio": (EntryPoint("trackio", "forge.trackers._built_in:trackio", GROUP), "trackio"),
}
"""Name → its entry point, and the module that it needs beside accelerate."""


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

    @property
    def name(self) -> str:
        """Name of the run directory."""
        return self.directory.name

    @property
    def files(self) -> Path:
        """Folder of the trackers' own files."""
        return self.directory / "trackers"


def check_trackers(names: Sequence[str]) -> None:
    """Check that each tracker is known and installed; imports none of them.

    Raises:
        SettingsError: one is not.

    """
    known = _known()
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SettingsError(f"trackers: there is no tracker {name!r}; known are {', '.join(sorted(known))}.{hint}")
        needed = ("accelerate", _BUILT_IN[name][1]) if name in _BUILT_IN else ()
        if any(find_spec(module) is None for module in needed):
            raise SettingsError(f"trackers: {name} is not installed: `pip install 'forge-llm[{name}]'`, or leave it out.")


def make_tracker(name: str, run: TrackedRun) -> Tracker:
    """Make a tracker of a run; it is not started yet."""
    make: Callable[[TrackedRun], Tracker] = _known()[name].load()
    return make(run)


def _known() -> dict[str, EntryPoint]:
    """Find all trackers; a package that is merely installed replaces none that is built in."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    return found | {name: entry for name, (entry, _) in _BUILT_IN.items()}
