"""Files that a run reads → inputs.json, by which what holds something else is found later.

The record has size and times of each file at once. A thread adds SHA-256 while the run trains, of files up to `_HASHED` bytes
in all; a run that ends before has a record without them.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

import forge_dist
from forge._progress import Reporter
from forge.settings._data_sets import paths_in
from forge.tasks._task import Task

FILE = "inputs.json"
INFO = "dataset_info.json"
"""LLaMA-Factory's file of many data sets."""
WEIGHTS = ("config.json", "adapter_config.json", "*.safetensors")
"""What a model's digest in run.json is of."""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
_TOKENIZER = ("tokenizer*", "chat_template*", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
_HASHED = 8 * 2**30
"""Bytes of files in all that are hashed, the smallest first. Of the others size and times must do."""
_SECONDS = 1.0
"""Seconds between two signs that the end of the run waits for the hashes."""
_AT_ONCE = 2**22
"""Bytes that are hashed between two looks at whether to stop."""
_ROWS = re.compile(r"\.(jsonl|ndjson|json|csv|tsv|parquet|arrow|feather)(\.(gz|zst))?$", re.IGNORECASE)
_FUNCTION = re.compile(r"([^\W\d]\w*(?:\.[^\W\d]\w*)*):\w+")
_GLOB = re.compile(r"[*?\[]")

Stamp = list[int]
"""Size, and times in nanoseconds of the last change of the content and of the file's record: no program sets the latter."""

_Entry = list[Any]
"""Stamp of a file and its SHA-256. No hash: not known. No stamp: written to since its rows were read."""


class Inputs:
    """Record of what a run reads, as it is now; a thread hashes the files from now on.

    Args:
        task: the verb.
        s: its settings.
        root: folder that holds the run's stores, in which inputs.json is written.
        report: says what is waited for at the end of the run.
        since: `time.time_ns()` from before the rows were read.
        former: directory of the run that is resumed. A file that has the stamp in its record is not hashed again.

    """

    def __init__(self, task: Task, s: Any, root: Path, report: Reporter, *, since: int, former: Path | None) -> None:
        self._report = report
        models = {name: Path(path) for name, (_, path) in models_of(task, s).items()}
        folder = s.adapter.adapter_path
        self._record: dict[str, Any] = {
            "files": _recorded({path: Path(path) for path in (*_sources(root), *_named(s))}, since),
            "places": {entry: names for entry in _entries(s) if (names := listed_files(entry)) is not None},
            "entries": {entry: digest for entry in _entries(s) if (digest := entry_digest(entry)) is not None},
            "models": {name: _of_model(path, since) for name, path in models.items() if path.is_dir()},
            "adapter": {} if folder is None else stamps_of(Path(folder), ADAPTER_FILES),
        }
        known = {} if former is None else _hashed_before(former)
        self._open: list[tuple[Path, _Entry]] = []
        for place, entry in _file_entries(self._record).items():
            stamp, entry[1] = entry[0], known.get((*place, str(entry[0])))
            if stamp is not None and entry[1] is None:
                self._open.append((models.get(place[0], Path()) / place[1], entry))
        (root / FILE).write_text(self._text(), encoding="utf-8")
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = threading.Thread(target=self._hash, name="hashes of inputs", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # no memory for its stack, or no process more is allowed
            self._thread = None

    def complete(self, run: Path) -> None:
        """Wait for the hashes, and write the record with them into the run's directory.

        Where it cannot be written the one without them stays.
        """
        if not self._open:
            return
        with self._report.taking("hashing the data files", "hashed the data files, which was not done when training ended,"):
            if self._thread is None:
                self._hash()
            while self._thread is not None and self._thread.is_alive():
                self._thread.join(_SECONDS)
                forge_dist.beat()
        with suppress(forge_dist.ExportError):
            forge_dist.write_text_atomically(run / FILE, self._text())

    def stop(self) -> None:
        """Let the thread end; the record stays as it is on disk."""
        self._stopping.set()

    def _text(self) -> str:
        return json.dumps(self._record, indent=1) + "\n"

    def _hash(self) -> None:
        """Add the hashes, the smallest file first, until they are `_HASHED` bytes in all."""
        left = _HASHED
        for path, entry in sorted(self._open, key=lambda each: (each[1][0][0], each[0])):
            stamp = entry[0]
            left -= stamp[0]
            if left < 0 or self._stopping.is_set():
                return
            with suppress(OSError):
                digest = self._sha256(path)
                # Equal stamps before and after: the content is what the hash is of, and was there before the rows were read.
                entry[:] = (stamp, digest) if stamp_of(path) == stamp else (None, None)

    def _sha256(self, path: Path) -> str | None:
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while not self._stopping.is_set() and (block := file.read(_AT_ONCE)):
                digest.update(block)
        return None if self._stopping.is_set() else digest.hexdigest()


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
        for value in (*attrs.asdict(owner, recurse=False).values(), s.data.own_values("preprocess")):
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
    given = [entry for each in (s.data.data_path, s.data.eval_data_path) for entry in paths_in(each)]
    return [entry for entry in given if "://" not in entry]


def listed_files(entry: str) -> list[str] | None:
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


def entry_digest(entry: str) -> str | None:
    """Return the SHA-256 of a data set's entry in dataset_info.json; None for anything else."""
    folder, found, name = entry.partition(f"{INFO}:")
    if not found:
        return None
    try:
        said = json.loads((Path(folder) / INFO).expanduser().read_text(encoding="utf-8"))[name]
    except (OSError, ValueError, LookupError, TypeError, RuntimeError, RecursionError):
        return None
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def stamp_of(path: Path) -> Stamp:
    found = path.stat()
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def stamps_of(folder: Path, patterns: Iterable[str]) -> dict[str, Stamp]:
    """Return name → stamp of the files of a directory that match."""
    return {file.name: stamp_of(file) for pattern in patterns for file in sorted(folder.glob(pattern)) if file.is_file()}


def models_of(task: Task, s: Any) -> dict[str, tuple[str, str]]:
    """Return the name in run.json → setting and path of each model of a run."""
    return {
        "model": ("model_path", s.model.model_path),
        **{name: (name, path) for name, path in task.other_models(s).items()},
    }


def _recorded(files: Mapping[str, Path], since: int) -> dict[str, _Entry]:
    """Return name → entry: no hash yet, and no stamp where the file was written to since."""
    found: dict[str, _Entry] = {}
    for name, path in files.items():
        with suppress(OSError):
            stamp = stamp_of(path)
            found[name] = [stamp if max(stamp[1:]) <= since else None, None]
    return found


def _of_model(folder: Path, since: int) -> dict[str, Any]:
    """Return what is recorded of a model directory."""
    beside = {file.name: file for pattern in _TOKENIZER for file in folder.glob(pattern) if file.is_file()}
    return {"weights": stamps_of(folder, WEIGHTS), "beside": _recorded(beside, since)}


def _file_entries(record: Mapping[str, Any]) -> dict[tuple[str, str], _Entry]:
    """Return the part of a record and a name in it → the entry of each file."""
    parts = {"files": record["files"]} | {name: about["beside"] for name, about in record["models"].items()}
    return {(part, name): entry for part, files in parts.items() for name, entry in files.items()}


def _hashed_before(run: Path) -> dict[tuple[str, ...], str]:
    """Return part, name and stamp → SHA-256, for those files of a run's record that have one."""
    try:
        entries = _file_entries(json.loads((run / FILE).read_text(encoding="utf-8")))
        return {(*place, str(stamp)): digest for place, (stamp, digest) in entries.items() if isinstance(digest, str)}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
