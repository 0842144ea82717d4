"""Names of trackers → what makes them: a row for each built-in one, and entry points."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec

from forge._errors import SettingsError
from forge.trackers._kubeflow import check_kubeflow
from forge.trackers._tracker import TrackedRun, Tracker

GROUP = "forge.trackers"
"""Entry-point group; a name is one of the setting `trackers`, its value a function of a `TrackedRun`."""

_BUILT_IN = {
    "wandb": (EntryPoint("wandb", "forge.trackers._built_in:wandb", GROUP), "wandb"),
    "mlflow": (EntryPoint("mlflow", "forge.trackers._built_in:mlflow", GROUP), "mlflow"),
    "tensorboard": (EntryPoint("tensorboard", "forge.trackers._built_in:tensorboard", GROUP), "tensorboard"),
    "trackio": (EntryPoint("trackio", "forge.trackers._built_in:trackio", GROUP), "trackio"),
    "kubeflow": (EntryPoint("kubeflow", "forge.trackers._kubeflow:kubeflow", GROUP), ""),
}
"""Name → its entry point, and the module that it needs beside accelerate; none where it needs neither."""


def check_trackers(names: Sequence[str]) -> None:
    """Check that each tracker is known and installed; imports none of them.

    Raises:
        SettingsError: one is not.

    """
    known = _known() if set(names) - _BUILT_IN.keys() else _BUILT_IN
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SettingsError(f"trackers: there is no tracker {name!r}; known are {', '.join(sorted(known))}.{hint}")
        module = _BUILT_IN[name][1] if name in _BUILT_IN else ""
        needed = ("accelerate", module) if module else ()
        if any(find_spec(module) is None for module in needed):
            raise SettingsError(f"trackers: {name} is not installed: `pip install 'forge-llm[{name}]'`, or leave it out.")
        if name == "kubeflow":
            check_kubeflow()


def make_tracker(name: str, run: TrackedRun) -> Tracker:
    """Make a tracker of a run; it is not started yet."""
    make: Callable[[TrackedRun], Tracker] = _known()[name].load()
    return make(run)


def _known() -> dict[str, EntryPoint]:
    """Find all trackers; a package that is merely installed replaces none that is built in."""
    found = {entry.name: entry for entry in entry_points(group=GROUP)}
    return found | {name: entry for name, (entry, _) in _BUILT_IN.items()}
