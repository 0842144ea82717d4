"""A path → a run directory that is either whole or not there, and the files in it that a person reads.

Everything made before training begins (token stores, plan, config) is made in a hidden folder inside and moved out at once by
`publish`. Until then a failure leaves the disk as it was found.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from forge._errors import RunDirectoryError

_STAGING = ".preparing"


class RunDirectory:
    """The run directory, claimed for this process; use as a context manager.

    The lock is on the directory itself and is held by the process, so it dies with its owner.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._made: list[Path] = []
        self._lock = -1
        self._log: TextIO | None = None
        self._metrics: TextIO | None = None
        self.published = False

    def __enter__(self) -> Self:
        try:
            self._make()
            self._claim()
            shutil.rmtree(self._staging, ignore_errors=True)
            self._staging.mkdir()
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
        for handle in (self._log, self._metrics):
            if handle is not None:
                handle.close()
        if not self.published:
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
            entry.rename(self.path / entry.name)
        self._staging.rmdir()
        self.published = True

    def log(self, line: str) -> None:
        """Append a line to `log.txt`, with the time."""
        if self._log is not None:
            stamp = time.strftime("%Y-%m-%d %H:%M:%S")
            self._log.write("".join(f"{stamp}  {part}\n" for part in line.splitlines() or [""]))
            self._log.flush()

    def metrics(self, values: Mapping[str, object]) -> None:
        """Append one JSON line to `metrics.jsonl` and flush it."""
        if self._metrics is not None:
            self._metrics.write(json.dumps(values) + "\n")
            self._metrics.flush()

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
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: holds another run. Give a new directory, or remove that run."
            )
        if held:
            shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: is not empty (it holds {shown}). Give a new or empty directory."
            )

    def _undo(self) -> None:
        """Leave the disk as it was found: remove the hidden folder and the directories that this object made."""
        if self._lock >= 0 and not self.published and self._staging.exists() and self._log is not None:
            shutil.rmtree(self._staging, ignore_errors=True)
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:
                break
        self._made.clear()
