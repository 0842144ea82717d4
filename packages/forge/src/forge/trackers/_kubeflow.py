"""A run → its progress in the status of the TrainJob that it is in (KEP-2779).

The controller gives three variables: an address, and the files of its certificate and of a token, which changes every hour.
"""

from __future__ import annotations

import json
import os
import ssl
import time
import urllib.request
from collections.abc import Iterable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from forge._errors import SettingsError
from forge.trackers._record import Record, figures
from forge.trackers._tracker import TrackedRun

VARIABLES = ("KUBEFLOW_TRAINER_SERVER_URL", "KUBEFLOW_TRAINER_SERVER_CA_CERT", "KUBEFLOW_TRAINER_SERVER_TOKEN")
_SECONDS = 5.0
"""Least time between two updates, and time for one."""
_NAMES = {"lr": "learning_rate", "step": "global_step"}
_FIRST = ("loss", "eval_loss", "learning_rate", "tokens_per_second", "global_step")
"""Names that are always among those sent: a search over TrainJobs looks for them."""
_MOST, _LONGEST = 256, 64
"""Most metrics of an update, and the longest name or value, by the schema of the TrainJob; together below its 64 kB."""


def in_trainjob() -> bool:
    """Return whether this process runs in a TrainJob whose controller takes updates."""
    return all(os.environ.get(name) for name in VARIABLES) and os.environ[VARIABLES[0]].startswith("https://")


def check_kubeflow() -> None:
    """Raise SettingsError outside of a TrainJob, and for an address that would show the token."""
    missing = [name for name in VARIABLES if not os.environ.get(name)]
    if missing:
        raise SettingsError(
            f"trackers: kubeflow sends to the TrainJob that a run is in, and {missing[0]} is not set: leave it out. Kubeflow "
            "sets it where the feature gate TrainJobStatus is on, and it needs no setting then."
        )
    if not os.environ[VARIABLES[0]].startswith("https://"):
        raise SettingsError(
            f"{VARIABLES[0]}={os.environ[VARIABLES[0]]!r} must begin with https://, or the token would be seen."
        )


def kubeflow(run: TrackedRun) -> KubeflowTracker:
    """Make a tracker of the TrainJob's status."""
    return KubeflowTracker(run)


class KubeflowTracker:
    """Sender of the newest figures, 5 seconds apart at least but for the last.

    An update that fails is left out, for the next one says more; only the last one is tried again.
    """

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._values: dict[str, float] = {}
        self._step = 0
        self._began: tuple[float, int] | None = None
        self._sent = -_SECONDS

    def start(self) -> None:
        """Take up what the run recorded before: an update replaces all figures of the one before it."""
        for values in Record(self._run.directory / "metrics.jsonl").new():
            self._take(figures(values), values["step"])

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Send nothing: a TrainJob's status has no place for settings."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Send an update, unless the last one is too new."""
        self._take(values, step)
        now = time.monotonic()
        if self._began is None:
            self._began = (now, step)
        if now - self._sent < _SECONDS:
            return
        self._sent = now
        try:
            self._post(self._progress())
        except Exception as error:  # noqa: BLE001 - whatever a server does, the next update says more
            print(f"kubeflow: {type(error).__name__}: {error}", flush=True)

    def finish(self) -> None:
        """Send what the run ended with: 100 % where it is finished."""
        self._post({"progressPercentage": 100, "estimatedRemainingSeconds": 0} if self._finished() else self._progress())

    def _take(self, values: dict[str, float], step: int) -> None:
        self._values |= {_NAMES.get(name, name): value for name, value in values.items()} | {"global_step": step}
        self._step = max(self._step, step)

    def _finished(self) -> bool:
        """Return whether the run wrote its result after its last step."""
        try:
            return int(json.loads((self._run.directory / "result.json").read_text(encoding="utf-8"))["steps"]) == self._step
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _progress(self) -> dict[str, int]:
        """Return how far the run is, where its length is known; 100 % is for the end."""
        total = self._run.num_steps
        if not total:
            return {}
        found = {"progressPercentage": min(99, 100 * self._step // total)}
        if self._began is not None and self._step > self._began[1]:
            seconds = (time.monotonic() - self._began[0]) / (self._step - self._began[1])
            found["estimatedRemainingSeconds"] = int(seconds * max(0, total - self._step))
        return found

    def _post(self, progress: dict[str, int]) -> None:
        """Send an update. Raises OSError where the server does not take it."""
        check_kubeflow()
        url, certificate, token = (os.environ[name] for name in VARIABLES)
        with open(token, encoding="utf-8") as file:
            secret = file.read().strip()
        status = {**progress, "metrics": list(_metrics(self._values)), "lastUpdatedTime": datetime.now(UTC).isoformat()}
        request = urllib.request.Request(  # noqa: S310 - https, checked above
            url,
            data=json.dumps({"trainerStatus": status}).encode(),
            headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
            method="POST",
        )
        opener = urllib.request.build_opener(
            urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=certificate)), _NoRedirect
        )
        with opener.open(request, timeout=_SECONDS) as answer, suppress(OSError):
            answer.read()


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Handler that follows no redirect: the token is for one server."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


def _metrics(values: dict[str, float]) -> Iterable[dict[str, str]]:
    """Yield name and value of each figure, those with fixed names first."""
    names = [name for name in _FIRST if name in values] + sorted(set(values) - set(_FIRST))
    fitting = [name for name in names if 0 < len(name) <= _LONGEST]
    for name in fitting[:_MOST]:
        yield {"name": name, "value": str(values[name])[:_LONGEST]}
