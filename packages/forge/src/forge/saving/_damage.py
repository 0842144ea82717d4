"""Finished run → what of it is not as it was written, by name, and what makes it whole.

A run is finished where result.json says so and every file of its exports has the SHA-256 that was recorded.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from forge._errors import RunDirectoryError
from forge._result import BEST, RESULT
from forge._sealed import unsealed
from forge.saving._exports import MARK, samples_of
from forge.saving._full_state import FOLDER as STATES, OPENED, closed_states
from forge.saving._hashes import FILE, FOLDER, damaged_files, events, hashes_in_events, not_a_directory, read_hashes

_MOST = 5
"""Damaged files that a message names."""


@attrs.frozen(kw_only=True)
class Damage:
    """What is wrong with a finished run; empty where it is whole."""

    result: str | None = None
    """What is wrong with result.json."""
    record: str | None = None
    """What is wrong with hf_format/hashes.json."""
    exports: dict[str, dict[str, str]] = attrs.field(factory=dict)
    """Export → file → what is wrong with it."""

    def __bool__(self) -> bool:
        return bool(self.result or self.record or self.exports)

    def __str__(self) -> str:
        lines = [f"{RESULT} {self.result}"] if self.result else []
        lines += [f"{FOLDER}/{FILE} {self.record}"] if self.record else []
        lines += [f"{FOLDER}/{name}: {fault}" for name, files in self.exports.items() for fault in files.values()]
        more = f"; and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
        return "; ".join(lines[:_MOST]) + more


def has_result(run: Path) -> bool:
    """Return whether the run says that it is finished."""
    return (run / RESULT).exists()


def damage_of(run: Path) -> Damage:
    """Compare a finished run with what was recorded of it: each file of each export is read.

    The last export and the best one must be there; of the others those that are.
    """
    result, last, seal = None, None, False
    try:
        values, seal = unsealed(run / RESULT)
        last = Path(str(values["model_dir"])).name
    except FileNotFoundError:
        result = "is missing"
    except (OSError, ValueError, KeyError) as error:
        result = str(error) if isinstance(error, ValueError) else f"cannot be read ({error!r})"
    known, record = {}, None
    try:
        known = read_hashes(run)
    except FileNotFoundError:
        # An earlier version recorded none, and sealed no result.
        record = "is missing" if seal or hashes_in_events(run) else None
    except (OSError, ValueError) as error:
        record = str(error)
    if record is not None:
        known = hashes_in_events(run)
    wanted = {last or last_name(run), *([BEST] if BEST in known and (run / FOLDER / MARK).exists() else [])}
    exports: dict[str, dict[str, str]] = {}
    for name in sorted({*known, *wanted} - {""}):
        directory = run / FOLDER / name
        if (other := not_a_directory(directory)) is not None:
            exports[name] = {"": other}
        elif not directory.is_dir():
            if name in wanted:
                exports[name] = {"": f"{name} is missing"}
        elif name in known:
            if found := damaged_files(directory, known[name]):
                exports[name] = {file: f"{name}/{fault}" for file, fault in found.items()}
        elif known:
            exports[name] = {"": f"{name} was never found equal to the model that was trained"}
        elif not _looks_whole(directory):
            exports[name] = {"": f"{name} has no config.json, or a file of weights that is not whole"}
    return Damage(result=result, record=record, exports=exports)


def last_name(run: Path) -> str:
    """Return the name of the last export that the events know, or "" where they know none."""
    counts = {name: count for name in hashes_in_events(run) if (count := samples_of(name)) is not None}
    return max(counts, key=lambda name: counts[name], default="")


def finished_values(run: Path) -> dict[str, Any] | None:
    """Return what result.json held, from the event of the run's end.

    None where it did not end, or went on since.
    """
    last: dict[str, Any] = {}
    for last in events(run, "started", "resumed", "finished"):  # noqa: B007 - the last one counts
        pass
    values = last.get("result") if last.get("event") == "finished" else None
    return values if isinstance(values, dict) and isinstance(values.get("model_dir"), str) else None


def refuse_damaged_run(run: Path, verb: str) -> None:
    """Raise RunDirectoryError where a finished run is not as it was written."""
    damage = damage_of(run)
    if damage:
        raise RunDirectoryError(
            f"ckpt_output_dir {run}: its run is finished, and is damaged: {damage}. {remedy(run, verb, damage)}"
        )


def refuse_damaged_export(run: Path, directory: Path) -> None:
    """Raise RunDirectoryError where a file of a run's export is not as it was recorded."""
    try:
        files = read_hashes(run).get(directory.name)
    except (OSError, ValueError):
        files = hashes_in_events(run).get(directory.name)
    if files and directory.parent == run / FOLDER and (found := damaged_files(directory, files)):
        raise RunDirectoryError(
            f"{directory}: is damaged: {'; '.join(found.values())}. `forge repair {run}` makes it whole where that can be done."
        )


def remedy(run: Path, verb: str, damage: Damage) -> str:
    """Say what makes a damaged run whole."""
    if not damage.exports:
        return f"`forge repair {run}` writes it again from events.jsonl."
    if (closed := closed_states(run)) is not None:
        return (
            f"`forge repair {run}` makes it whole from {STATES}/ for a user who may read that: {closed}. {OPENED}, or "
            "repair as one who may."
        )
    if any((run / STATES).glob("step_*")):
        return f"`forge repair {run}` makes it whole from {STATES}/."
    return (
        f"No full state was kept to make it from (keep_full_state=true keeps one): `forge repair {run}` takes what another "
        f"export has the same of, and what is left only training again makes: {again(run, verb)}."
    )


def again(run: Path, verb: str) -> str:
    """Return the command that trains a run again in another directory."""
    return f"`forge {verb} {run / 'config.yaml'} --ckpt-output-dir NEW`"


def _looks_whole(directory: Path) -> bool:
    """Return whether an export without hashes has a configuration and whole headers."""
    from safetensors import SafetensorError, safe_open

    if not any((directory / name).is_file() for name in ("config.json", "adapter_config.json")):
        return False
    for file in directory.glob("*.safetensors"):
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError):
            return False
    return True
