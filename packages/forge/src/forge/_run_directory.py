"""A path → a run directory that is either whole or not there, and the files in it that a person reads.

Everything made before training begins (token stores, plan, config) is made in a hidden folder inside and moved out at once by
`publish`. Until then a failure leaves the disk as it was found; so does a refusal (exit status 2) before the first step.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from forge._errors import RunDirectoryError, RunWriteError

_STAGING = ".forge-preparing"


class RunDirectory:
    """The run directory, claimed for this process; use as a context manager.

    The lock is on the directory itself and is held by the process, so it dies with its owner.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(_named(path))))
        self.published = False
        self.began = False
        """Whether a step was made: from then on the run is kept, however it ends."""
        self._made: list[Path] = []
        self._entries: list[Path] = []
        self._lock = -1
        self._log: TextIO | None = None
        self._metrics: TextIO | None = None

    def __enter__(self) -> Self:
        try:
            self._make()
            self._claim()
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir()
            self._entries = [self._staging]
            # metrics.jsonl is opened here too, so that a directory that cannot be written is found before any work is done.
            self._log = (self._staging / "log.txt").open("a", encoding="utf-8")
            self._metrics = (self._staging / "metrics.jsonl").open("a", encoding="utf-8")
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
        with contextlib.suppress(OSError):
            if error is not None and not refused:
                how = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                self.log(f"{how}: {type(error).__name__}: {error}")
        for handle in (self._log, self._metrics):
            if handle is not None:
                with contextlib.suppress(OSError):
                    handle.close()
        if refused:
            self._undo()
        if self._lock >= 0:
            os.close(self._lock)

    @property
    def _staging(self) -> Path:
        return self.path / _STAGING

    @property
    def root(self) -> Path:
        """Where files go now: the hidden folder until `publish`, the run directory from then on."""
        return self.path if self.published else self._staging

    def publish(self) -> None:
        """Move what was prepared to its place: from here on the directory is a run."""
        # config.yaml last: it is what makes the directory a run.
        for entry in sorted(self._staging.iterdir(), key=lambda entry: entry.name == "config.yaml"):
            self._entries.append(entry.rename(self.path / entry.name))
        self._staging.rmdir()
        self.published = True

    def log(self, line: str) -> None:
        """Append a line to `log.txt`, with the time. Raises RunWriteError."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._append(self._log, "".join(f"{stamp}  {part}\n" for part in line.splitlines() or [""]))

    def metrics(self, values: Mapping[str, object]) -> None:
        """Append one JSON line to `metrics.jsonl` and flush it. Raises RunWriteError."""
        self._append(self._metrics, json.dumps(values) + "\n")

    def _append(self, handle: TextIO | None, text: str) -> None:
        if handle is None:
            return
        try:
            handle.write(text)
            handle.flush()
        except OSError as error:
            name = Path(handle.name).name
            raise RunWriteError(
                f"{self.root / name}: cannot be written: {error.strerror or error}. What was exported before is whole; "
                "make room and start again in a new directory."
            ) from error

    def _make(self) -> None:
        missing = []
        path = self.path.absolute()
        while not path.exists():
            missing.append(path)
            path = path.parent
        for folder in reversed(missing):
            folder.mkdir()
            self._made.append(folder)
        if not self.path.is_dir():
            raise RunDirectoryError(f"ckpt_output_dir {self.path}: is a file. Give a directory, new or empty.")

    def _claim(self) -> None:
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: another run is writing to it now. Give another directory, or wait for that run."
            ) from error
        held = sorted(entry.name for entry in self.path.iterdir() if entry.name != _STAGING)
        if "config.yaml" in held:
            which = "another run" if "hf_format" in held else "another run, which made no export"
            raise RunDirectoryError(f"ckpt_output_dir {self.path}: holds {which}. Give a new directory, or remove that run.")
        if held:
            shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: is not empty (it holds {shown}). Give a new or empty directory."
            )

    def _undo(self) -> None:
        """Leave the disk as it was found: remove what this object made, and only that."""
        for entry in self._entries:
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:
                break
        self._made.clear()


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
