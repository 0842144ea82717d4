"""Run directory → its record: settings with origins, events, answers, results, state.

A run may be killed while it writes, and is read while it writes: what is missing or torn is left out, never an error.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import yaml

from forge._errors import SettingsError
from forge._near import near
from forge.locking._run_lock import has_owner
from forge.settings._recipe import origins_in, values_in

_STARTS = ("started", "resumed")
_ENDINGS = ("finished", "preempted", "interrupted", "failed")
# What was found out before the first step stands in sections of its own.
SETUP = ("machine", "read", "data", "planned", "adapted", "parts")
_MOST_BYTES = 8 * 2**20
"""Of a longer file of answers or events, the first and the last half of so many bytes are read."""


@attrs.frozen(kw_only=True)
class Setting:
    """One setting of a run as it was resolved."""

    name: str
    value: Any
    origin: str
    """`default`, `flag`, `recipe FILE`, `argument`, `environment: NAME` or `chosen: REASON`."""

    @property
    def chosen_by(self) -> str:
        """Who chose it: you, forge, or nobody."""
        return self.origin.partition(":")[0]

    @property
    def reason(self) -> str:
        """Why forge chose it, or the variable of the environment."""
        return self.origin.partition(": ")[2]


@attrs.frozen(kw_only=True)
class Record:
    """What a run wrote about itself, but its curves."""

    path: Path
    settings: dict[str, Setting]
    verb: str
    events: list[dict[str, Any]]
    result: dict[str, Any]
    """Of result.json; empty before the end."""
    answers: list[dict[str, Any]]
    memory: dict[str, Any]
    evals: dict[str, dict[str, Any]]
    """Of each file of evals/, task → figures."""
    osft: dict[str, Any]
    held_out: str
    """What the held-out samples are known by, equal for equal tokens; empty where there are none, or nothing tells."""
    state: str
    """`running`, `finished`, `preempted`, `interrupted`, `failed`, or `killed` where it ended without a word."""

    def last(self, kind: str, **about: object) -> dict[str, Any]:
        """Return the last event of a kind; empty where there is none."""
        found = (event for event in reversed(self.events) if event["event"] == kind)
        return next((event for event in found if about.items() <= event.items()), {})

    def value(self, name: str) -> Any:
        """Return a setting's value; None where the run has no such setting."""
        return self.settings[name].value if name in self.settings else None


def read_record(path: Path, *, running: bool | None = None) -> Record:
    """Read a run directory; whether it is `running` is found out where that is None.

    Raises:
        SettingsError: this is no run directory.

    """
    file = path / "config.yaml"
    try:
        text = file.read_text(encoding="utf-8")
        values = values_in(text) or {}
    except FileNotFoundError:
        what = "there is no such directory" if not path.exists() else "is no run directory: it has no config.yaml"
        raise SettingsError(f"{path}: {what}.{near(path)} Give the ckpt_output_dir of a run.") from None
    except NotADirectoryError:
        # `RUN/config.yaml`, or another file of a run, whether or not it is there.
        run = next((folder for folder in path.parents if (folder / "config.yaml").is_file()), None)
        meant = f"its run, {run}" if run is not None else "the ckpt_output_dir of a run"
        raise SettingsError(f"{path}: is a file, and not the directory of a run. Give {meant}.") from None
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise SettingsError(f"{file}: cannot be read: {' '.join(str(error).split())}. Put the run's own back.") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{file}: is not what a run writes: it holds no settings. Put the run's own back.")
    origins = origins_in(text)
    events = [event for event in _lines(path / "events.jsonl") if isinstance(event.get("event"), str)]
    result, known = _object(path / "result.json"), _object(path / "run.json")
    return Record(
        path=path,
        settings={
            str(name): Setting(name=str(name), value=value, origin=origins.get(str(name), "")) for name, value in values.items()
        },
        verb=str(known.get("verb", "")),
        events=events,
        result=result,
        answers=[line for line in _lines(path / "answers.jsonl") if isinstance(line.get("step"), int)],
        memory=_object(path / "memory.json"),
        evals={file.stem: found for file in sorted(path.glob("evals/*.json")) if (found := _scores(_object(file)))},
        osft=_object(path / "osft" / "plan.json"),
        held_out=_held_out(path, known.get("stores")),
        state=_state(path, events, result, running),
    )


def moment(text: Any) -> datetime.datetime | None:
    """Read a time of a line; None where it is none."""
    with suppress(TypeError, ValueError):
        found = datetime.datetime.fromisoformat(text)
        return found if found.tzinfo else found.replace(tzinfo=datetime.UTC)
    return None


def starts(events: list[dict[str, Any]]) -> list[str]:
    """Return the times at which training was started or resumed."""
    return sorted(event["time"] for event in events if event["event"] in _STARTS and moment(event.get("time")))


def active_seconds(events: list[dict[str, Any]], times: list[tuple[str, str]]) -> float | None:
    """Add up the time from each start to the last that it wrote.

    Args:
        events: of all starts.
        times: of the first and the last line of metrics.jsonl of each start.

    """
    began = [found for at in starts(events) if (found := moment(at))]
    seen = [event.get("time") for event in events if event["event"] not in SETUP] + [last for _, last in times]
    moments = sorted(found for at in seen if (found := moment(at)))
    total = 0.0
    for number, at in enumerate(began):
        following = began[number + 1 : number + 2]
        within = [one for one in moments if at <= one and not (following and following[0] <= one)]
        total += (within[-1] - at).total_seconds() if within else 0.0
    return total if began else None


def device_seconds(events: list[dict[str, Any]], times: list[tuple[str, str]]) -> dict[str, float]:
    """Add up the seconds of every rank by device, from the first line of each start to its last.

    Args:
        events: of all starts, each of which tells its machine first.
        times: as for `active_seconds`.

    Returns:
        Name of a device, such as `cuda` → seconds; none for a run that did not tell.

    """
    began = [(at, event) for event in events if event["event"] == "machine" and (at := moment(event.get("time")))]
    moments = sorted(at for text in [*(e.get("time") for e in events), *(last for _, last in times)] if (at := moment(text)))
    found: dict[str, float] = {}
    for number, (at, machine) in enumerate(began):
        following = began[number + 1][0] if number + 1 < len(began) else None
        within = [one for one in moments if at <= one and (following is None or one < following)]
        ranks, device = machine.get("ranks"), machine.get("device")
        if within and isinstance(ranks, int) and isinstance(device, str):
            found[device] = found.get(device, 0.0) + ranks * (within[-1] - at).total_seconds()
    return found


def _state(path: Path, events: list[dict[str, Any]], result: dict[str, Any], running: bool | None) -> str:
    if running or (running is None and has_owner(path)):
        return "running"
    if result:
        return "finished"
    kinds = [event["event"] for event in events if event["event"] in _STARTS + _ENDINGS]
    return kinds[-1] if kinds and kinds[-1] in _ENDINGS else "killed"


def _held_out(path: Path, stores: Any) -> str:
    """Return the fingerprint of the held-out rows' store, or of which samples are held out."""
    if isinstance(stores, dict) and "eval" in stores:
        return str(stores["eval"])
    split = _object(path / "data" / "train.held_out.json")
    return hashlib.sha256(json.dumps(split, sort_keys=True).encode()).hexdigest() if split else ""


def _object(file: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSONL file; of a very long one those of its beginning and its end."""
    try:
        with file.open("rb") as opened:
            text = opened.read(_MOST_BYTES)
            if len(text) == _MOST_BYTES:
                half = _MOST_BYTES // 2
                size = opened.seek(0, os.SEEK_END)
                opened.seek(max(half, size - half))
                text = text[:half] + b"\n" + opened.read()
    except OSError:
        return
    for line in text.splitlines():
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(line), dict):
                yield found


def _scores(found: dict[str, Any]) -> dict[str, Any]:
    """Return task → figures of a result of lm-evaluation-harness."""
    tasks = found.get("results")
    return {
        str(task): {
            name.partition(",")[0]: value
            for name, value in figures.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        for task, figures in (tasks if isinstance(tasks, dict) else {}).items()
        if isinstance(figures, dict)
    }
