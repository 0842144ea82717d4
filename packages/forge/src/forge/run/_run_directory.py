"""A path → a run directory that is whole, or not there; the files in it that a person reads; and a run that goes on in it.

Everything made before training begins (token stores, plan, config) is made in a hidden folder inside and moved out at once by
`publish`. Until then a failure leaves the disk as it was found; so does a refusal (exit status 2) before the first step. A directory
that holds a run already is that run's, `resuming`: what is prepared again is compared with what lies there, and thrown away.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

import forge_dist
from forge._errors import RunDirectoryError, RunWriteError
from forge.run._directories import discard, make_directories, remove_empty

_STAGING = ".forge-preparing"
_PREPARED = frozenset({"data", "plan", "osft", "run.json", "log.txt", "metrics.jsonl"})
_LOGS = "logs"
"""Where a launcher keeps its ranks' output: made before the run itself."""


class RunDirectory:
    """The run directory, claimed for this process; use as a context manager.

    The lock is on the directory itself and is held by the process, so it dies with its owner.

    Args:
        path: of the directory; new, empty, or a run's.
        resume: `never` refuses a directory that holds a run.

    """

    def __init__(self, path: str | Path, *, resume: str = "auto") -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(_named(path))))
        self.published = False
        self.resuming = False
        """Whether the directory holds a run that is to go on."""
        self.began = False
        """Whether a step was made: from then on the run is kept, however it ends."""
        self._resume = resume
        self._made: list[Path] = []
        self._entries: list[Path] = []
        self._lock = -1
        self._log: TextIO | None = None
        self._metrics: TextIO | None = None

    def __enter__(self) -> Self:
        try:
            self._make()
            self._claim()
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir()
            self._entries = [self.staging]
            # metrics.jsonl is opened here too, so that a directory that cannot be written is found before any work is done.
            self._log = (self.staging / "log.txt").open("a", encoding="utf-8")
            self._metrics = (self.staging / "metrics.jsonl").open("a", encoding="utf-8")
        except RunDirectoryError:
            self._undo()
            raise
        except OSError as error:
            self._undo()
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: cannot be written: {error.strerror or error}. Give a directory that you may write to."
            ) from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        refused = not self.published or (not self.began and getattr(error, "exit_status", None) == 2)
        # On a full disk the last words may not be written, which must not hide why the run ended.
        with contextlib.suppress(OSError, RunWriteError):
            if error is not None and not refused:
                self.log(_how(error))
        for handle in (self._log, self._metrics):
            if handle is not None:
                with contextlib.suppress(OSError):
                    handle.close()
        if refused:
            self._undo()
        self._release()

    @property
    def staging(self) -> Path:
        """The hidden folder in which a run is prepared."""
        return self.path / _STAGING

    @property
    def root(self) -> Path:
        """Where files go now: the hidden folder until `publish`, the run directory from then on."""
        return self.path if self.published else self.staging

    def publish(self, config: str) -> None:
        """Write config.yaml and move what was prepared to its place: from here on the directory is a run.

        A run that goes on keeps its own data; its log is gone on with, and plan and config.yaml, which say how it is divided
        now, take the place of the former.
        """
        (self.staging / "config.yaml").write_text(config, encoding="utf-8")
        if self.resuming:
            self._publish_anew()
        else:
            # config.yaml last: it is what makes the directory a run.
            for entry in sorted(self.staging.iterdir(), key=lambda entry: entry.name == "config.yaml"):
                self._entries.append(entry.rename(self.path / entry.name))
        shutil.rmtree(self.staging)
        self.published = True

    def _publish_anew(self) -> None:
        assert self._log is not None
        assert self._metrics is not None
        self._log.close()
        self._metrics.close()
        said = (self.staging / "log.txt").read_text(encoding="utf-8")
        self._log = (self.path / "log.txt").open("a", encoding="utf-8")
        self._append(self._log, said)
        self._metrics = (self.path / "metrics.jsonl").open("a", encoding="utf-8")
        # It was finished, perhaps, and goes on all the same: for longer.
        (self.path / "result.json").unlink(missing_ok=True)
        for name in ("plan/plan.npz", "config.yaml"):
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.staging / name).replace(self.path / name)
        # What a killed run left half-written has hidden names, which nothing reads; its owner is gone, for the lock is ours.
        for folder in (self.path, self.path / "hf_format"):
            for left in folder.glob(".*.tmp"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def check(self, metrics_bytes: int | None) -> None:
        """Raise RunDirectoryError if the run cannot go on from a state with that much of metrics.jsonl, or (None) without a state."""
        if not self.resuming:
            return
        file = self.path / "metrics.jsonl"
        if metrics_bytes is None:
            done = [name for name in ("result.json", "hf_format") if (self.path / name).exists()]
            if done:
                raise RunDirectoryError(
                    f"ckpt_output_dir {self.path}: holds a run with {' and '.join(done)} and no full state to go on from: what it trained "
                    "would be lost. Give another ckpt_output_dir, or remove that run."
                )
        elif file.exists() and 0 < file.stat().st_size < metrics_bytes:
            raise RunDirectoryError(
                f"{file}: has {file.stat().st_size:,} bytes, and had {metrics_bytes:,} when the state to go on from was saved: it was "
                "cut or replaced. Put it back, remove it, or give another ckpt_output_dir."
            )

    def rewind(self, metrics_bytes: int, samples: int) -> list[str]:
        """Forget what came after a position: later lines of metrics.jsonl, and exports of more samples, which will be made again.

        Returns the names of the exports that went.
        """
        if not self.resuming:
            return []
        file = self.path / "metrics.jsonl"
        found = file.read_bytes()
        if len(found) > metrics_bytes:
            if self._metrics is not None:
                self._metrics.close()
            forge_dist.write_text_atomically(file, found[:metrics_bytes].decode("utf-8"))
            self._metrics = file.open("a", encoding="utf-8")
        gone = []
        for export in sorted(self.path.glob("hf_format/samples_*")):
            count = export.name.removeprefix("samples_")
            if count.isdigit() and int(count) > samples:
                discard(export)
                gone.append(export.name)
        return gone

    @property
    def metrics_bytes(self) -> int:
        """How long metrics.jsonl is now."""
        return (self.root / "metrics.jsonl").stat().st_size

    def log(self, line: str) -> None:
        """Append a line to `log.txt`, with the time. Raises RunWriteError."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._append(self._log, "".join(f"{stamp}  {part}\n" for part in line.splitlines() or [""]))

    def metrics(self, values: Mapping[str, object]) -> None:
        """Append one JSON line to `metrics.jsonl` and flush it; a figure that is not finite becomes null. Raises RunWriteError."""
        finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
        self._append(self._metrics, json.dumps(finite) + "\n")

    def _append(self, handle: TextIO | None, text: str) -> None:
        if handle is None:
            return
        try:
            handle.write(text)
            handle.flush()
        except OSError as error:
            name = Path(handle.name).name
            raise RunWriteError(
                f"{self.root / name}: cannot be written: {error.strerror or error}. What was saved before is whole: make room, and "
                "the same command goes on from there."
            ) from error

    def _make(self) -> None:
        self._made = make_directories(self.path)

    def _claim(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: another run is writing to it now. Give another directory, or wait for that run."
            ) from error
        held = sorted(entry.name for entry in self.path.iterdir() if entry.name not in (_STAGING, _LOGS))
        if self.staging.exists() and "config.yaml" not in held:
            # A run was killed while it published what it had prepared: it is made again.
            for name in _PREPARED.intersection(held):
                entry = self.path / name
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            held = [name for name in held if name not in _PREPARED]
        self.resuming = "config.yaml" in held
        if self.resuming and self._resume == "never":
            which = "another run" if "hf_format" in held else "another run, which made no export"
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: holds {which}, and resume=never. Give a new directory, or resume=auto to go on with it."
            )
        if held and not self.resuming:
            shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: is not empty (it holds {shown}). Give a new or empty directory."
            )

    def _undo(self) -> None:
        """Leave the disk as it was found: remove what this object made, and only that; and let go of the directory."""
        for entry in self._entries:
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        remove_empty(self._made)
        self._made.clear()
        self._release()

    def _release(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


class NoDirectory:
    """What the other ranks have in its place: the first rank alone writes the run's files, and the others know where they are."""

    resuming = published = began = False
    metrics_bytes = 0

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(_named(path))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def publish(self, config: str) -> None:
        """Do nothing."""

    def check(self, metrics_bytes: int | None) -> None:
        """Do nothing."""

    def rewind(self, metrics_bytes: int, samples: int) -> list[str]:  # noqa: ARG002 - the first rank's business
        """Do nothing."""
        return []

    def log(self, line: str) -> None:
        """Do nothing."""

    def metrics(self, values: Mapping[str, object]) -> None:
        """Do nothing."""


def _how(error: BaseException) -> str:
    if getattr(error, "exit_status", None) == 75:
        return str(error)
    how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    return f"{how}: {type(error).__name__}: {error}"


def _named(path: str | Path) -> str:
    """Return the path as text that can be written down in the run's own files."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RunDirectoryError(f"ckpt_output_dir {text!r}: the name is not UTF-8. Give another one.") from error
    if "\0" in text:
        raise RunDirectoryError(f"ckpt_output_dir {text!r}: the name holds a NUL. Give another one.")
    return text
