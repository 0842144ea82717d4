"""Run that trains → its copy at `checkpoint_storage`, by a thread that no step waits for."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from forge._errors import RunDirectoryError, SettingsError, StorageError
from forge._stderr import StandardError
from forge.storage._remote import Remote
from forge.storage._restore import restore
from forge.storage._snapshot import HOLDER, Snapshot, links_of, local_files, newest_step, snapshots
from forge.storage._upload import Upload

_LOOK_SECONDS = 1.0
_MOST_SECONDS = 60.0
"""Longest pause after an attempt that failed."""
_STALLED_SECONDS = 120.0
"""How long a run that ends waits for a copy that makes no progress."""
_ATTEMPTS = 3


class Storage:
    """Copy of a run directory at a URL, made by the first rank; a context manager.

    A thread looks for full states and exports that are complete, and copies them. What fails is a warning and is tried again;
    a run that ended well raises StorageError where its copy is not whole then.

    Args:
        url: `checkpoint_storage`; without one nothing is done.
        resume: the setting of that name.

    """

    def __init__(self, url: str | None, resume: str = "auto") -> None:
        self._url, self._resume = url, resume
        self._remote: Remote | None = None
        self._note: Callable[[str], None] = lambda line: print(f"forge: {line}", file=StandardError(), flush=True)
        self._lines: list[str] = []
        self._path: Path | None = None
        self._upload: Upload | None = None
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._moved = time.monotonic()
        self._problem: str | None = None

    def check(self) -> str | None:
        """Check that the URL can be written; return a line on what it holds, None without a URL.

        Raises:
            SettingsError, StorageError: it cannot be read or written.
            RunDirectoryError: it holds other files.

        """
        if self._url is None:
            return None
        newest = self._open()
        what = "empty" if newest is None else f"holds {newest}, which a run with an empty ckpt_output_dir resumes"
        return f"checkpoint_storage {self._url}: can be written, {what}"

    def prepare(self, path: Path, *, resuming: bool) -> None:
        """Fetch the run into an empty run directory; compare it with the run that is there already.

        Raises:
            SettingsError, StorageError: the URL cannot be read or written, or what it holds is damaged.
            RunDirectoryError: it holds another run, other files, or later steps of this one.

        """
        self._path = path
        if self._url is None:
            return
        if (folder := Remote(self._url).local_folder) is not None and folder.is_relative_to(path):
            raise SettingsError(
                f"checkpoint_storage {self._url}: lies in ckpt_output_dir {path}, which is what is copied to it. Give another "
                "directory."
            )
        newest = self._open()
        if newest is None:
            return
        if resuming:
            self._compare(path, newest)
            return
        if self._resume == "never":
            raise RunDirectoryError(
                f"checkpoint_storage {self._url}: holds {newest}, and resume=never. Give another one, or resume=auto to resume "
                "it."
            )
        assert self._remote is not None
        self._note(f"fetching {newest} from {self._url}")
        began = said = time.monotonic()

        def show(done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > 30:
                said = time.monotonic()
                self._note(f"fetched {done / 2**20:,.0f} of {total / 2**20:,.0f} MiB")

        restore(self._remote, newest, path, show)
        self._lines.append(f"fetched {newest} from {self._url} in {time.monotonic() - began:.0f} s")

    def begin(self, identity: str, note: Callable[[str], None]) -> None:
        """Copy the run from now on.

        Args:
            identity: of the run, as in its run.json.
            note: logs a line; called by `tell` alone, which the thread of the run calls.

        Raises:
            RunDirectoryError: the URL holds another run.
            StorageError: it cannot be written.

        """
        self._note = note
        if self._remote is None:
            return
        assert self._path is not None
        newest = self._newest(self._remote)
        if newest is not None and newest.run != identity:
            raise self._another(newest)
        self._upload = Upload(self._remote, self._path, identity, self._progress)
        self._upload.take()
        self._lines.append(f"checkpoint_storage {self._url}: each full state and export is copied there in the background")
        links = sorted(entry.relative_to(self._path).as_posix() for entry in links_of(self._path))
        if links:
            self._lines.append(f"WARNING: checkpoint_storage {self._url}: links are not copied: {', '.join(links)}")
        self.tell()
        self._thread = threading.Thread(target=self._work, args=(self._upload,), name="storage", daemon=True)
        self._thread.start()

    def tell(self) -> None:
        """Log what the thread has to say."""
        while self._lines:
            self._note(self._lines.pop(0))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._thread is None and self._remote is not None and error is None:
            # A run that was finished already: what its copy lacks is sent.
            assert self._path is not None
            self.begin(_identity(self._path), self._note)
        if self._thread is None:
            return
        self._moved = time.monotonic()
        self._ending.set()
        while self._thread.is_alive() and time.monotonic() - self._moved < _STALLED_SECONDS:
            self._thread.join(0.2)
        if self._thread.is_alive():
            self._problem = f"checkpoint_storage {self._url}: no byte was taken for {_STALLED_SECONDS:.0f} s"
        self.tell()
        if self._problem is None:
            return
        whole = f"the run in {self._path} is whole, and the same command copies what is missing"
        if error is None:
            raise StorageError(f"{self._problem} The copy of the run is not complete; {whole}.")
        self._note(f"WARNING: {self._problem} The copy of the run is not complete; the one before it is whole")

    def _open(self) -> Snapshot | None:
        """Connect; return the newest snapshot that a run can be resumed from."""
        assert self._url is not None
        remote = Remote(self._url)
        names = remote.names()
        if "" in names:
            raise SettingsError(f"checkpoint_storage {self._url}: is a file. Give a directory of this run's own, new or empty.")
        if names and HOLDER not in names:
            shown = ", ".join(sorted(names)[:3]) + (", ..." if len(names) > 3 else "")
            raise RunDirectoryError(
                f"checkpoint_storage {self._url}: is not empty and holds no run (but {shown}). Give a directory of this run's "
                "own, new or empty."
            )
        remote.check_writable()
        self._remote = remote
        return self._newest(remote)

    @staticmethod
    def _newest(remote: Remote) -> Snapshot | None:
        return next((each for each in snapshots(remote, remote.names()) if each.resumable), None)

    def _another(self, newest: Snapshot) -> RunDirectoryError:
        return RunDirectoryError(
            f"checkpoint_storage {self._url}: holds another run ({newest.run}) than ckpt_output_dir {self._path}. Give a "
            "directory of this run's own."
        )

    def _compare(self, path: Path, newest: Snapshot) -> None:
        """Refuse a run directory whose run is another one, or older than its copy."""
        if _identity(path) != newest.run:
            raise self._another(newest)
        here = newest_step(local_files(path))
        finished = (path / "result.json").exists()
        later = newest.step is not None and (here or 0) < newest.step
        if later and not finished and self._resume in ("auto", "never"):
            raise RunDirectoryError(
                f"ckpt_output_dir {path}: its run is at step {here or 0}, and checkpoint_storage {self._url} holds step "
                f"{newest.step} of it. Give a new or empty ckpt_output_dir to resume from there, or name a state to go back to "
                "(resume=PATH)."
            )

    def _progress(self, _size: int) -> None:
        self._moved = time.monotonic()

    def _work(self, upload: Upload) -> None:
        pause, warned, attempts = _LOOK_SECONDS, "", 0
        while True:
            last = self._ending.wait(pause)
            try:
                while upload.sync():
                    self._problem = None
            except Exception as error:  # noqa: BLE001 - whatever a copy meets, the run goes on
                self._problem = str(error) if isinstance(error, StorageError) else f"{type(error).__name__}: {error}."
                if not self._problem.endswith("."):
                    self._problem += "."
                if self._problem != warned:
                    warned = self._problem
                    self._lines.append(f"WARNING: {warned} The run goes on, and it is tried again")
                pause = min(2 * pause, _MOST_SECONDS)
                attempts += last
                if attempts >= _ATTEMPTS:
                    return
                if last:
                    time.sleep(_LOOK_SECONDS)
                    pause = 0
                continue
            self._problem, pause, attempts, warned = None, _LOOK_SECONDS, 0, ""
            if last:
                return


def _identity(path: Path) -> str:
    """Return the identity of the run in a directory, empty where run.json cannot be read."""
    try:
        return str(json.loads((path / "run.json").read_text(encoding="utf-8"))["run"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
