"""Path → a run directory that is complete or not there, with its log, metrics and config.

Everything made before training begins (token stores, plan, config) is made in a hidden folder inside and moved out at once by
`publish`. Until then a failure leaves the disk as it was found; so does a refusal (exit status 2) before the first step. A
directory that holds a run already is resumed: what is prepared again is compared with what it holds, and removed.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import unicodedata
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import forge_dist
from forge._clock import go_on_after, now
from forge._disk import what_stays, write_remedy
from forge._errors import ForgeError, RunDirectoryError, RunTakenOverError, RunWriteError
from forge._printable import printable
from forge.locking._run_lock import RunLock, is_record, unwritable
from forge.reports._report import LiveReport
from forge.saving._damage import has_result
from forge.saving._directories import check_files, make_directories, next_start, remove_at_once, remove_empty
from forge.saving._entries import GROWING, PLAN, PREPARED, REPLACED, WRITTEN, check_kinds
from forge.saving._exports import put_back, samples_of
from forge.saving._inputs import FILE as INPUTS, Inputs
from forge.storage._restore import remove_half

_STAGING = ".forge-preparing"
_LOGS = "logs"
"""Folder of the ranks' output, which a launcher makes before the run itself."""


class RunDirectory:
    """Run directory, locked for this process; a context manager.

    A run that lost its lock to another one (`forge.locking`) writes nothing more: RunTakenOverError instead.

    Args:
        path: of the directory; new, empty, or a run's.
        resume: `never` refuses a directory that holds a run.
        prepare: called with the path and `resuming`, once the directory is locked; may put a run into an empty one.

    """

    def __init__(self, path: str | Path, *, resume: str = "auto", prepare: Callable[..., None] | None = None) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(_checked_name(path))))
        self.published = False
        self.resuming = False
        """Whether the directory holds a run that is resumed."""
        self.began = False
        """Whether a step was made: from then on the run is kept, however it ends."""
        self.step = 0
        """Steps made, which an event is recorded with."""
        self.watch: Callable[[dict[str, Any]], None] | None = None
        """Is given what a line of metrics.jsonl says, once it is written."""
        self.inputs: Inputs | None = None
        """Record of what the run reads, whose hashes are waited for at its end."""
        self._resume = resume
        self._prepare = prepare
        self._replaces = False
        self._made: list[Path] = []
        self._entries: list[Path] = []
        self._placed: set[str] = set()
        self._fetched: list[Path] = []
        self._lock = RunLock(self.path, name="ckpt_output_dir")
        self._guard = contextlib.ExitStack()
        self._files: dict[str, TextIO] = {}
        self._report = LiveReport(self.path, self.log)

    def __enter__(self) -> Self:
        try:
            self._make()
            self._claim()
            shutil.rmtree(self.staging, ignore_errors=True)
            self.staging.mkdir()
            self._entries.append(self.staging)
            # All are opened here, so that a directory that cannot be written is refused before any work.
            for name in GROWING:
                self._open(name)
        except ForgeError:
            self._undo()
            raise
        except OSError as error:
            self._undo()
            raise unwritable(f"ckpt_output_dir {self.path}", error) from error
        # Starts are told apart, and added up, by their times.
        if (behind := go_on_after(self.path / name for name in GROWING if name.endswith(".jsonl"))) >= 1:
            self.log(f"the clock is {behind:,.0f} s behind the run's last line: its times go on from there", event="clock")
        if self._lock.followed:
            self.log(self._lock.followed, event="taken_over")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if self.inputs is not None and error is None and self.published:
                self.inputs.complete(self.path)
        finally:
            if self.inputs is not None:
                self.inputs.stop()
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        """Log how the run ended, undo one that was not published, and release the lock."""
        name_for_good(error, self.path)
        if isinstance(error, KeyboardInterrupt):
            error.args = (": ".join([*map(str, error.args), next_start(self.path)]),)
        status = getattr(error, "exit_status", None)
        refused = not self.published or (not self.began and status == 2)
        if status == 2 and not self.began:
            # After any other end the same command goes on from what was fetched.
            self._entries += self._fetched
        # On a full disk the last line may not be written, which must not hide why the run ended.
        with contextlib.suppress(OSError, RunTakenOverError):
            self._lock.check()
        with contextlib.suppress(OSError, RunWriteError):
            if error is not None and not refused and not self._lock.lost:
                self.log(*_ending(error))
            if not refused and not self._lock.lost:
                self._report.renew(ended=True)
        for handle in self._files.values():
            with contextlib.suppress(OSError):
                handle.close()
        if refused:
            self._undo()
        self._release()

    @property
    def staging(self) -> Path:
        """Hidden folder in which a run is prepared."""
        return self.path / _STAGING

    @property
    def root(self) -> Path:
        """Folder to write to now: the hidden one until `publish`, the run directory from then on."""
        return self.path if self.published else self.staging

    @property
    def has_steps(self) -> bool:
        """Whether the run in the directory made a step, or holds anything that a step leaves."""
        if (
            (self.path / "result.json").exists()
            or any(self.path.glob("full_state/step_*"))
            or any(self.path.glob("hf_format/*"))
        ):
            return True
        try:
            lines = (self.path / "metrics.jsonl").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return True
        return any('"loss"' in line for line in lines)

    def replace(self) -> None:
        """Let the run that is prepared now replace one without steps, once it is published."""
        self.resuming, self._replaces = False, True

    def place(self, name: str) -> Path:
        """Return the path of an entry that is made at its final place before `publish`.

        A failure removes it like all that was made, unless the run that is resumed had it.
        """
        path = self.path / name
        self._placed.add(name)
        if not path.exists():
            self._entries.append(path)
        return path

    def publish(self, config: str) -> None:
        """Write config.yaml and move what was prepared to its place: the directory is a run now.

        A resumed run keeps its own data and appends to its log; plan and config.yaml are replaced, as they say how the run is
        divided now.
        """
        self._lock.check()
        (self.staging / "config.yaml").write_text(config, encoding="utf-8")
        if self.resuming:
            self._publish_resumed()
        else:
            if self._replaces:
                self._remove_replaced()
            # config.yaml last: it makes the directory a run.
            for entry in sorted(self.staging.iterdir(), key=lambda entry: entry.name == "config.yaml"):
                self._entries.append(entry.rename(self.path / entry.name))
        shutil.rmtree(self.staging)
        self.published = True

    def _remove_replaced(self) -> None:
        for name in REPLACED:
            if name in self._placed:
                continue  # it is the new run's by now
            entry = self.path / name
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink(missing_ok=True)

    def _publish_resumed(self) -> None:
        for name in GROWING:
            self._files[name].close()
            written = (self.staging / name).read_text(encoding="utf-8")
            self._open(name, self.path)
            self._append(name, written)
        put_back(self.path)
        # A finished run may be resumed for more steps.
        (self.path / "result.json").unlink(missing_ok=True)
        for name in (PLAN, "memory.json", INPUTS, "config.yaml"):
            if (self.staging / name).exists():  # a small model has no memory plan
                (self.path / name).parent.mkdir(exist_ok=True)
                (self.staging / name).replace(self.path / name)
        # What a killed run left half-written has a hidden name; its owner is gone, for this process holds the lock.
        for folder in (self.path, *(self.path / name for name in WRITTEN)):
            for left in folder.glob(".*.tmp"):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        for half in sorted(self.path.glob("hf_format/*/**/.*.tmp")):  # of a file that was being mended
            half.unlink()

    def check(self, metrics_bytes: int | None) -> None:
        """Raise RunDirectoryError where the run's files do not fit the state to resume from.

        Args:
            metrics_bytes: length of metrics.jsonl when that state was saved; None without a state.

        """
        if not self.resuming:
            return
        file = self.path / "metrics.jsonl"
        if metrics_bytes is None:
            if has_result(self.path):
                raise RunDirectoryError(
                    f"ckpt_output_dir {self.path}: holds a finished run and no full state to resume from: what it trained "
                    "would be lost. Give another ckpt_output_dir, or remove that run."
                )
        elif file.exists() and 0 < file.stat().st_size < metrics_bytes:
            raise RunDirectoryError(
                f"{file}: has {file.stat().st_size:,} bytes, and had {metrics_bytes:,} when the state to resume from was "
                "saved: it was cut or replaced. Put it back, remove it, or give another ckpt_output_dir."
            )

    def rewind(self, metrics_bytes: int, samples: int | None) -> list[str]:
        """Remove later lines of metrics.jsonl and exports of more samples than a position has.

        Both are made again. With `samples=None`, of a run that begins anew for want of a full state, the exports stay until
        their steps are made again. Returns the names of the exports that were removed.
        """
        if not self.resuming:
            return []
        file = self.path / "metrics.jsonl"
        found = file.read_bytes()
        if len(found) > metrics_bytes:
            self._files[file.name].close()
            forge_dist.write_bytes_atomically(file, found[:metrics_bytes])
            self._open(file.name)
        removed = []
        for export in sorted(self.path.glob("hf_format/samples_*")) if samples is not None else ():
            count = samples_of(export.name)
            if count is not None and samples is not None and count > samples:
                remove_at_once(export)
                removed.append(export.name)
        return removed

    @property
    def metrics_bytes(self) -> int:
        """Length of metrics.jsonl now."""
        return (self.root / "metrics.jsonl").stat().st_size

    def settle(self) -> int:
        """Make metrics.jsonl durable, and return its length: a full state may record it now.

        Raises:
            RunWriteError: the disk does not take them.

        """
        handle = self._files["metrics.jsonl"]
        try:
            handle.flush()
            os.fsync(handle.fileno())
        except OSError as error:
            raise self._unwritable("metrics.jsonl", error) from error
        return self.metrics_bytes

    def log(self, line: str, event: str = "", **about: object) -> None:
        """Append a line to `log.txt`, with the time, and an event also to `events.jsonl`.

        Args:
            line: what happened; one that begins with WARNING is an event by itself.
            event: its kind, such as `resumed`.
            about: what else a program may want to know of it.

        Raises:
            RunWriteError: it cannot be written.

        """
        stamp = now().astimezone().strftime("%Y-%m-%d %H:%M:%S")
        self._append("log.txt", "".join(f"{stamp}  {printable(part)}\n" for part in line.splitlines() or [""]))
        event = event or ("warning" if line.startswith("WARNING") else "")
        if event:
            self._append("events.jsonl", _json_line({"step": self.step, "event": event, "text": line, **about}))

    def metrics(self, values: Mapping[str, object]) -> None:
        """Append a JSON line to `metrics.jsonl`: the time, and null for a figure that is not finite.

        Raises:
            RunWriteError: it cannot be written.

        """
        self.step = int(str(values.get("step", self.step)))
        line = _json_line(values)
        self._append("metrics.jsonl", line)
        if self.watch is not None:
            self.watch(json.loads(line))
        if self.published:
            self._report.renew(measured=any(name.startswith("eval_") for name in values))

    def _open(self, name: str, folder: Path | None = None) -> None:
        self._files[name] = ((folder or self.root) / name).open("a", encoding="utf-8")

    def _append(self, name: str, text: str) -> None:
        try:
            self._lock.check_lately()
            self._files[name].write(text)
            self._files[name].flush()
        except OSError as error:
            raise self._unwritable(name, error) from error

    def _unwritable(self, name: str, error: OSError) -> RunWriteError:
        return RunWriteError(
            f"{self.root / name}: cannot be written: {error.strerror or error}. {what_stays(begun=self.published)}: "
            f"{write_remedy(error)}."
        )

    def _make(self) -> None:
        self._made = make_directories(self.path)

    def _claim(self) -> None:
        """Lock the directory, and find out whether it is new, holds a run, or holds anything else."""
        self._lock.acquire()
        self._guard.enter_context(forge_dist.guarded(self.path, self._lock.check))
        remove_half(self.path)
        names = [entry.name for entry in self.path.iterdir() if not is_record(entry.name)]
        held = sorted(name for name in names if name not in (_STAGING, _LOGS))
        if self.staging.exists() and "config.yaml" not in held:
            # A run was killed while it published what it had prepared: it is made again.
            for name in PREPARED.intersection(held):
                entry = self.path / name
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
            held = [name for name in held if name not in PREPARED]
        self.resuming = "config.yaml" in held
        if self.resuming:
            check_files(self.path)
            check_kinds(self.path, held)
        if self.resuming and self._resume == "never":
            which = "another run" if "hf_format" in held else "another run, which made no export"
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: holds {which}, and resume=never. Give a new directory, or resume=auto to resume "
                "it."
            )
        if held and not self.resuming:
            shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
            raise RunDirectoryError(
                f"ckpt_output_dir {self.path}: is not empty (it holds {shown}). Give a new or empty directory."
            )
        if self._prepare is not None:
            before = set(self.path.iterdir())
            self._prepare(self.path, resuming=self.resuming)
            self._fetched = sorted(entry for entry in set(self.path.iterdir()) - before if not entry.name.startswith("."))
            self.resuming = (self.path / "config.yaml").exists()

    def _undo(self) -> None:
        """Remove what this object made, unless the directory was lost, and release the lock."""
        for entry in () if self._lock.lost else self._entries:
            if entry.is_dir():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                # A file system that became read-only must not hide why the run ended.
                with contextlib.suppress(OSError):
                    entry.unlink(missing_ok=True)
        self._release()
        remove_empty(self._made)
        self._made.clear()

    def _release(self) -> None:
        self._guard.close()
        self._lock.release()


class NoDirectory:
    """Stand-in for the run directory on all ranks but the first, which alone writes files."""

    resuming = published = began = False
    metrics_bytes = step = 0

    def __init__(self, path: str | Path) -> None:
        self.path = Path(os.path.abspath(os.path.expanduser(_checked_name(path))))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        name_for_good(error, self.path)

    def publish(self, config: str) -> None:
        """Do nothing on this rank."""

    def check(self, metrics_bytes: int | None) -> None:
        """Do nothing on this rank."""

    def rewind(self, metrics_bytes: int, samples: int | None) -> list[str]:  # noqa: ARG002 - the first rank's business
        """Do nothing on this rank."""
        return []

    def settle(self) -> int:
        """Do nothing on this rank."""
        return 0

    def log(self, line: str, event: str = "", **about: object) -> None:
        """Do nothing on this rank."""

    def metrics(self, values: Mapping[str, object]) -> None:
        """Do nothing on this rank."""


def name_for_good(error: BaseException | None, path: Path) -> None:
    """Let an error name files as they are called in the run `path`, not in the hidden folder."""
    if error is None:
        return
    staging = str(path / _STAGING)
    error.args = tuple(arg.replace(staging, str(path)) if isinstance(arg, str) else arg for arg in error.args)
    if isinstance(error, OSError) and isinstance(error.filename, str):
        error.filename = error.filename.replace(staging, str(path))


def _ending(error: BaseException) -> tuple[str, str]:
    """Return the last line of a log, how the run ended, and the kind of that event."""
    status = getattr(error, "exit_status", None)
    if status == 75:
        return str(error), "preempted"
    if isinstance(error, KeyboardInterrupt):
        return f"interrupted: {error}", "interrupted"
    how = "interrupted" if status == 143 else "failed"
    return f"{how}: {type(error).__name__}: {error}", how


def _json_line(values: Mapping[str, object]) -> str:
    """Write values as a line of JSON: the time (RFC 3339, UTC), null where one is not finite."""
    time = now().isoformat(timespec="milliseconds").replace("+00:00", "Z")
    finite = {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}
    return json.dumps({"time": time, **finite}) + "\n"


def _checked_name(path: str | Path) -> str:
    """Return the path as text. Raises RunDirectoryError where no file of the run could name it."""
    text = str(path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        if (encoding := sys.getfilesystemencoding()) != "utf-8":
            why = f"Python reads names as {encoding} here (PYTHONUTF8=0, or a locale of that encoding)"
            raise RunDirectoryError(f"ckpt_output_dir {text!r}: {why}. Set PYTHONUTF8=1.") from error
        raise RunDirectoryError(f"ckpt_output_dir {text!r}: the name is not UTF-8. Give another one.") from error
    if any(unicodedata.category(sign) == "Cc" for sign in text):
        # A NUL names nothing; the others would control whatever prints a message of this run.
        raise RunDirectoryError(f"ckpt_output_dir {text!r}: the name holds a control character. Give another one.")
    return text
