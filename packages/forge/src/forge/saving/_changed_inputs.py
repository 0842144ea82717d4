"""Record of what a finished run read, and what is there now → warnings of what changed.

Size and times are compared first, and the content only where these differ: of files by their SHA-256, of a model's weights by
the digest in run.json, of an adapter with the run's own copy.
"""

from __future__ import annotations

import filecmp
import json
import os
import re
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import forge_data
import forge_dist
from forge._counted import counted
from forge._progress import Reporter
from forge.saving._inputs import (
    ADAPTER_FILES,
    FILE,
    INFO,
    WEIGHTS,
    Stamp,
    entry_digest,
    listed_files,
    models_of,
    stamp_of,
    stamps_of,
)
from forge.tasks._task import Task

_SHOWN = 3
"""Files that a warning names."""
_DIGEST = re.compile("[0-9a-f]{64}")


def changed_inputs(task: Task, s: Any, run: Path, report: Reporter, *, adapter: Path) -> list[str]:
    """Return warnings that inputs of a finished run are not what it read.

    Files that are gone are not judged. `adapter` is the run's copy of that in `adapter_path`.
    """
    with report.taking("comparing what the run read with what is there now"):
        try:
            was = json.loads((run / FILE).read_text(encoding="utf-8"))
            changed, written = _compared(task, s, run, adapter, was)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            # A run of an earlier version, or a record that is damaged.
            changed, written = _compared(task, s, run, adapter, None)
    return [_warning(names, verb) for names, verb in ((changed, "changed"), (written, "written to")) if names]


def _compared(task: Task, s: Any, run: Path, adapter: Path, was: Any) -> tuple[list[str], list[str]]:
    """Name what changed, and what was written to and cannot be compared; `was` is the record."""
    known = was or {"files": {}, "places": {}, "models": {}, "adapter": {}}
    states = {name: _state(Path(name), stamp, digest) for name, (stamp, digest) in known["files"].items()}
    kept = _with_same_entries(known.get("entries", {}))
    changed = [name for name, state in states.items() if state == "changed" and name not in kept]
    written = [name for name, state in states.items() if state == "written"]
    changed += _changed_media(run)
    if was is None:
        written += _written_since(run)
    for entry, names in known["places"].items():
        if (now := listed_files(entry)) is not None and now != names:
            changed.append(f"{entry} (other files)")
    for name, (setting, path) in models_of(task, s).items():
        if not _same_model(Path(path), known["models"].get(name), run, name):
            changed.append(f"{setting} {path}")
    path = s.adapter.adapter_path
    if path is not None and not _same_adapter(Path(path), adapter, known["adapter"]):
        changed.append(f"adapter_path {path}")
    return changed, written


def _written_since(run: Path) -> list[str]:
    """List the local data files that were written to after the run had read them."""
    found = []
    for store in sorted((run / "data").glob("*/store.json")):
        for source in json.loads(store.read_text(encoding="utf-8")).get("sources", []):
            with suppress(OSError, ValueError):
                if Path(source["path"]).stat().st_mtime > store.stat().st_mtime:
                    found.append(source["path"])
    return found


def _changed_media(run: Path) -> list[str]:
    """List the images of the rows that were replaced after the run had read them."""
    found: dict[str, None] = {}
    for store in sorted((run / "data").glob("*/store.json")):
        began = store.stat().st_mtime_ns
        files: set[tuple[str, str]] = set()
        for kind in (forge_data.TokenStore, forge_data.PromptStore):  # one of which it is
            with suppress(forge_data.ForgeDataError):
                files |= kind.open(store.parent).media_files
        for path, sha256 in sorted(files):
            with suppress(OSError):
                now = os.stat(path)
                # A file that was moved here keeps its time of writing.
                touched = stat.S_ISREG(now.st_mode) and max(now.st_mtime_ns, now.st_ctime_ns) > began
                if touched and forge_dist.file_hash(Path(path))[1] != sha256:
                    found[path] = None
            forge_dist.beat()
    return [*found]


def _warning(names: list[str], verb: str) -> str:
    more = [counted(len(names) - _SHOWN, "others")] if len(names) > _SHOWN else []
    *first, last = [*names[:_SHOWN], *more]
    shown = f"{', '.join(first)} and {last}" if first else last
    how = verb if verb == "changed" else f"{'were' if first else 'was'} {verb}"
    return (
        f"WARNING: {shown} {how} after this run had read {'them' if first else 'it'}, and its result is of what was there; to "
        "train on what is there now, give another ckpt_output_dir"
    )


def _with_same_entries(known: Mapping[str, str]) -> set[str]:
    """Return the files whose entries of this run are what they were, whatever others say."""
    same: dict[str, bool] = {}
    for entry, digest in known.items():
        file = os.path.abspath((Path(entry.partition(f"{INFO}:")[0]) / INFO).expanduser())
        same[file] = same.get(file, True) and entry_digest(entry) == digest
    return {file for file, is_same in same.items() if is_same}


def _state(path: Path, stamp: Stamp | None, digest: str | None) -> str:
    """Return `same`, `changed`, or `written` for a file that cannot be compared."""
    try:
        now = stamp_of(path)
        if now == stamp:
            return "same"
        if stamp is None:
            return "written"
        if now[0] != stamp[0]:
            return "changed"
        if digest is None:
            return "written" if now[1] != stamp[1] else "same"
        found = forge_dist.file_hash(path)[1]
        forge_dist.beat()
        return "same" if found == digest else "changed"
    except OSError:
        return "same"


def _same_model(folder: Path, was: Mapping[str, Any] | None, run: Path, name: str) -> bool:
    """Return whether a model directory holds what the run began with, as far as is known."""
    if not folder.is_dir():
        return True
    try:
        now, began = stamps_of(folder, WEIGHTS), (run / "run.json").stat().st_mtime_ns
        known = json.loads((run / "run.json").read_text(encoding="utf-8")).get(name)
        differs = any(stamp[1] > began for stamp in now.values()) if was is None else now != was["weights"]
        if differs and isinstance(known, str) and _DIGEST.fullmatch(known) and forge_dist.model_identity(str(folder)) != known:
            return False
    except (OSError, ValueError, AttributeError):
        return True
    return was is None or all(_state(folder / file, *of) != "changed" for file, of in was["beside"].items())


def _same_adapter(folder: Path, own: Path, was: Mapping[str, Stamp]) -> bool:
    """Return whether an adapter's directory holds what the run has a copy of."""
    if not folder.is_dir() or not own.is_dir() or (was and stamps_of(folder, ADAPTER_FILES) == was):
        return True
    try:
        return all(filecmp.cmp(folder / name, own / name, shallow=False) for name in ADAPTER_FILES)
    except OSError:
        return True
