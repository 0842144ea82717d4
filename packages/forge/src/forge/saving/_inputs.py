"""Files that a run reads → inputs.json, and later which of them hold something else.

Size and times are compared first, and the content only where these differ: of files up to `_HASHED` bytes in all by their
SHA-256, of a model's weights by the digest in run.json, of an adapter with the run's own copy.
"""

from __future__ import annotations

import filecmp
import glob
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

import forge_dist
from forge._counted import counted
from forge._progress import Reporter
from forge.tasks._task import Task

FILE = "inputs.json"
_INFO = "dataset_info.json"
"""LLaMA-Factory's file of many data sets."""
_HASHED = 8 * 2**30
"""Bytes of data files in all that are hashed, the smallest first: some seconds. Of the others size and times must do."""
_SHOWN = 3
_WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors")
"""What a model's digest in run.json is of."""
_TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
_ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
_ROWS = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow|feather)(\.(gz|zst))?$", re.IGNORECASE)
_FUNCTION = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):\w+")
_GLOB = re.compile(r"[*?\[]")
_DIGEST = re.compile("[0-9a-f]{64}")

_Stamp = list[int]
"""Size, and times in nanoseconds of the last change of the content and of the file's record: no program sets the latter."""


def write_inputs(task: Task, s: Any, root: Path, report: Reporter, *, since: int) -> None:
    """Write to `root` what the run reads, as it is now.

    Args:
        task: the verb.
        s: its settings.
        root: folder that holds the run's stores.
        report: says what takes time.
        since: `time.time_ns()` from before the rows were read. A file that was written to later is recorded without a stamp.

    """
    with report.taking("hashing the data files", "hashed the data files"):
        files = _recorded({*_sources(root), *_named(s)}, since)
    models = {name: _of_model(path, since) for name, (_, path) in _models(task, s).items()}
    folder = s.adapter.adapter_path
    about = {
        "files": files,
        "places": {entry: names for entry in _entries(s) if (names := _listed(entry)) is not None},
        "entries": {entry: digest for entry in _entries(s) if (digest := _described(entry)) is not None},
        "models": {name: found for name, found in models.items() if found is not None},
        "adapter": {} if folder is None else _stamps(Path(folder), _ADAPTER),
    }
    (root / FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


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
    if was is None:
        written += _written_since(run)
    for entry, names in known["places"].items():
        if (now := _listed(entry)) is not None and now != names:
            changed.append(f"{entry} (other files)")
    for name, (setting, path) in _models(task, s).items():
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


def _warning(names: list[str], verb: str) -> str:
    more = [counted(len(names) - _SHOWN, "others")] if len(names) > _SHOWN else []
    *first, last = [*names[:_SHOWN], *more]
    shown = f"{', '.join(first)} and {last}" if first else last
    how = verb if verb == "changed" else f"{'were' if first else 'was'} {verb}"
    return (
        f"WARNING: {shown} {how} after this run had read {'them' if first else 'it'}, and its result is of what was there; to "
        "train on what is there now, give another ckpt_output_dir"
    )


def _sources(root: Path) -> Iterator[str]:
    """Yield the local data files of the stores in a run; of a saved dataset its files."""
    for store in sorted((root / "data").glob("*/store.json")):
        for source in json.loads(store.read_text(encoding="utf-8"))["sources"]:
            with suppress(OSError, ValueError):
                for path in (Path(source["path"]), Path(source["path"].rpartition(":")[0] or ".")):
                    if path.is_file():
                        yield str(path)
                    elif path.is_absolute() and path.is_dir():
                        yield from (str(each) for each in _dataset(path))


def _dataset(folder: Path) -> list[Path]:
    """List the files of rows in a directory, without what `datasets` caches beside them."""
    return [
        each
        for each in sorted(folder.rglob("*"))
        if _ROWS.search(each.name)
        and not each.name.startswith("cache-")
        and not any(part.startswith((".", "_")) for part in each.relative_to(folder).parts)
        and each.is_file()
    ]


def _named(s: Any) -> Iterator[str]:
    """Yield files that settings of data and objective name: a preprocess, a template, a reward."""
    for owner in (s.data, s.objective):
        for value in attrs.asdict(owner, recurse=False).values():
            for text in value if isinstance(value, (list, tuple, Mapping)) else [value]:
                # A word such as `nll` is no file, though there may be one of that name.
                if not isinstance(text, str) or "\n" in text or not {".", "/", ":"}.intersection(text):
                    continue
                with suppress(OSError, ValueError, RuntimeError):
                    for file in (Path(text).expanduser(), Path(text.rpartition(":")[0]).expanduser(), _module(text)):
                        if file is not None and file.is_file():
                            yield os.path.abspath(file)


def _module(text: str) -> Path | None:
    """Return the file of `package.module:function`, not imported; None for anything else."""
    if (found := _FUNCTION.fullmatch(text)) is None:
        return None
    name = f"{found[1].replace('.', '/')}.py"
    return next((file for folder in sys.path if (file := Path(folder or ".") / name).is_file()), None)


def _entries(s: Any) -> list[str]:
    """List the entries of the data that are directories or patterns."""
    given = [each if isinstance(each, (list, tuple, Mapping)) else [each] for each in (s.data.data_path, s.data.eval_data_path)]
    return [entry for each in given for entry in each if isinstance(entry, str) and "://" not in entry]


def _listed(entry: str) -> list[str] | None:
    """List the files of a directory or a pattern; None for anything else, or nothing."""
    try:
        path = Path(entry).expanduser()
        if path.is_dir():
            return [str(each.relative_to(path)) for each in _dataset(path)]
        if path.exists() or not _GLOB.search(entry):
            return None
        return sorted(each for each in glob.glob(str(path), recursive=True) if Path(each).is_file()) or None
    except (OSError, ValueError, RuntimeError):
        return None


def _described(entry: str) -> str | None:
    """Return the SHA-256 of a data set's entry in dataset_info.json; None for anything else."""
    folder, found, name = entry.partition(f"{_INFO}:")
    if not found:
        return None
    try:
        said = json.loads((Path(folder) / _INFO).expanduser().read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, RecursionError):
        return None
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _with_same_entries(known: Mapping[str, str]) -> set[str]:
    """Return the files whose entries of this run are what they were, whatever others say."""
    same: dict[str, bool] = {}
    for entry, digest in known.items():
        file = os.path.abspath((Path(entry.partition(f"{_INFO}:")[0]) / _INFO).expanduser())
        same[file] = same.get(file, True) and _described(entry) == digest
    return {file for file, is_same in same.items() if is_same}


def _stamp(path: Path) -> _Stamp:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _stamps(folder: Path, patterns: Iterable[str]) -> dict[str, _Stamp]:
    """Return name → stamp of the files of a directory that match."""
    return {file.name: _stamp(file) for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()}


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    forge_dist.beat()
    return found


def _recorded(paths: Iterable[str], since: int) -> dict[str, tuple[_Stamp | None, str | None]]:
    """Return path → stamp and hash.

    Both are None where the file was written to since, and the hash alone where that would take long.
    """
    found: dict[str, tuple[_Stamp | None, str | None]] = {}
    left = _HASHED
    stamps: dict[str, _Stamp] = {}
    for path in paths:
        with suppress(OSError):
            stamps[path] = _stamp(Path(path))
    for path, stamp in sorted(stamps.items(), key=lambda item: (item[1][0], item[0])):
        left -= stamp[0]
        with suppress(OSError):
            digest = _sha256(Path(path)) if left >= 0 else None
            whole = max(stamp[1:]) <= since and _stamp(Path(path)) == stamp
            found[path] = (stamp, digest) if whole else (None, None)
    return found


def _state(path: Path, stamp: _Stamp | None, digest: str | None) -> str:
    """Return `same`, `changed`, or `written` for a file that cannot be compared."""
    try:
        now = _stamp(path)
        if now == stamp:
            return "same"
        if stamp is None:
            return "written"
        if now[0] != stamp[0]:
            return "changed"
        if digest is None:
            return "written" if now[1] != stamp[1] else "same"
        return "same" if _sha256(path) == digest else "changed"
    except OSError:
        return "same"


def _models(task: Task, s: Any) -> dict[str, tuple[str, str]]:
    """Return the name in run.json → setting and path of each model of a run."""
    return {"model": ("model_path", s.model.model_path), **{name: (name, path) for name, path in task.other_models(s).items()}}


def _of_model(path: str, since: int) -> dict[str, Any] | None:
    """Return what is recorded of a model directory; None for a hub name."""
    folder = Path(path)
    if not folder.is_dir():
        return None
    beside = {str(file) for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()}
    files = {Path(name).name: known for name, known in _recorded(beside, since).items()}
    return {"weights": _stamps(folder, _WEIGHTS), "beside": files}


def _same_model(folder: Path, was: Mapping[str, Any] | None, run: Path, name: str) -> bool:
    """Return whether a model directory holds what the run began with, as far as is known."""
    if not folder.is_dir():
        return True
    try:
        now, began = _stamps(folder, _WEIGHTS), (run / "run.json").stat().st_mtime_ns
        known = json.loads((run / "run.json").read_text(encoding="utf-8")).get(name)
        differs = any(stamp[1] > began for stamp in now.values()) if was is None else now != was["weights"]
        if differs and isinstance(known, str) and _DIGEST.fullmatch(known) and forge_dist.model_identity(str(folder)) != known:
            return False
    except (OSError, ValueError, AttributeError):
        return True
    return was is None or all(_state(folder / file, *of) != "changed" for file, of in was["beside"].items())


def _same_adapter(folder: Path, own: Path, was: Mapping[str, _Stamp]) -> bool:
    """Return whether an adapter's directory holds what the run has a copy of."""
    if not folder.is_dir() or not own.is_dir() or (was and _stamps(folder, _ADAPTER) == was):
        return True
    try:
        return all(filecmp.cmp(folder / name, own / name, shallow=False) for name in _ADAPTER)
    except OSError:
        return True
