"""Run directory → a lock that holds on this host and across hosts.

Two locks in one. The kernel's (flock, on the directory) is let go by itself when its process dies, and is seen by this host
alone: a network's file system has none for directories, or keeps it to itself. So the owner also keeps a record in the
directory, `.forge-owner-N`, in which it counts up while it lives. Whoever finds a record watches it: one that goes on counting
is alive; one that stood still for its lease, or whose process is proved to be gone, is followed by `.forge-owner-N+1`, which
one process alone can make, and removed. No two clocks are compared. An owner that finds its record gone writes nothing more.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import random
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs

from forge._clock import since_boot
from forge._errors import RunDirectoryError, RunTakenOverError
from forge._stderr import StandardError
from forge.locking._owner import Owner

_RECORD = re.compile(r"\.forge-owner-(\d{1,18})")
_MOST_BYTES = 1 << 16
"""Bytes that are read of what may be a record: one has a few hundred."""
_LEASE_SECONDS = 60.0
_RENEWALS = 12
"""Renewals in the time of a lease."""
_LOOKS = 120
"""Looks at another owner's record in the time of its lease."""
_JOIN_SECONDS = 5.0
_TRIES, _TRY_SECONDS = 40, 0.05
"""How often, and after which pause, a lock of the kernel is tried that somebody holds who left no record."""
_NO_FLOCK = frozenset({errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP})
"""What a file system says that has no locks for directories: then the record alone keeps others out."""
_GONE = frozenset({errno.ENOENT, errno.ESTALE, errno.ENOTDIR})


def is_record(name: str) -> bool:
    """Return whether a run directory's entry belongs to its lock and not to its run.

    NFS keeps a file that is removed while a process has it open, under a name of its own.
    """
    return _RECORD.fullmatch(name) is not None or name.startswith(".nfs")


def lease_seconds() -> float:
    """Return the lease of this process; a private variable shortens it for tests."""
    return float(os.environ.get("FORGE_LEASE_SECONDS", _LEASE_SECONDS))


def has_owner(path: Path) -> bool:
    """Return whether a process seems to own a directory, for what is shown; takes no lock.

    Of an owner that cannot be asked from here its last renewal is compared with this host's clock.
    """
    with contextlib.suppress(OSError):
        folder = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        finally:
            os.close(folder)
        for file, text in _records(path).items():
            owner = Owner.read(text)
            lease = _LEASE_SECONDS if owner is None else owner_lease(owner)
            if not (owner is not None and owner.is_gone) and abs(time.time() - file.stat().st_mtime) < lease:
                return True
    return False


class RunLock:
    """Ownership of a run directory; a context manager.

    Args:
        path: of the directory, which exists.
        name: what the path is called in messages.
        busy: what is said of a directory that another process owns.
        remedy: what to do then.
        say: called with a line before it is watched whether another owner still lives.

    """

    def __init__(
        self,
        path: Path,
        *,
        name: str = "",
        busy: str = "another run is writing to it now",
        remedy: str = "Give another directory, or wait for that run.",
        say: Callable[[str], None] = lambda line: print(f"forge: {line}", file=StandardError(), flush=True),
    ) -> None:
        self._path, self._said, self._busy, self._remedy, self._say = path, f"{name} {path}".lstrip(), busy, remedy, say
        self._lease = lease_seconds()
        self._folder = -1
        self._file: Path | None = None
        self._descriptor = -1
        self._owner = Owner.here(secrets.token_hex(16), self._lease)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._verified = 0.0
        self.lost = False
        """Whether another process took the directory over."""
        self.followed = ""
        """Sentence on the owner that stood still and was taken over from, or empty."""

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()

    def acquire(self) -> None:
        """Become the owner.

        Waits for the lease of an owner that cannot be asked, at most.

        Raises:
            RunDirectoryError: the directory has an owner that lives, or cannot be read or written.

        """
        try:
            self._flock()
            while not self._follow():
                pass
        except BaseException as error:
            self.release()
            if isinstance(error, OSError) and not isinstance(error, RunDirectoryError):
                raise unwritable(self._said, error) from error
            raise
        self._thread = threading.Thread(target=self._keep, name="forge-lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Read whether this process is still the owner, before it writes what counts.

        Raises:
            RunTakenOverError: it is not; nothing may be written any more.

        """
        if self._file is None:
            return
        # The time before the look: a process may be stopped right after it.
        now = since_boot()
        if self.lost or not self._is_ours():
            self.lost = True
            raise RunTakenOverError(
                f"{self._said}: this run lost it and ends without writing anything more: {self._successor()} Let that run go "
                "on, or stop it and start the same command again."
            )
        self._verified = now

    def check_lately(self) -> None:
        """Like `check`, without looking at the directory where it was looked at moments ago."""
        if self.lost or since_boot() - self._verified > self._lease / 4:
            self.check()

    def release(self) -> None:
        """Let go of the directory; of one that was lost nothing is touched."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(_JOIN_SECONDS)
            if self._thread.is_alive():
                self._descriptor = -1  # the file system does not answer; it is closed with the process
            self._thread = None
        with contextlib.suppress(OSError):
            if self._file is not None and not self.lost and self._is_ours():
                self._file.unlink()
        self._file = None
        for descriptor in (self._descriptor, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._descriptor = self._folder = -1

    def _flock(self) -> None:
        """Take the kernel's lock, where the file system has one."""
        self._folder = os.open(self._path, os.O_RDONLY)
        for _ in range(_TRIES):
            try:
                fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                found = [owner for text in _records(self._path).values() if (owner := Owner.read(text)) is not None]
                alive = [owner for owner in found if not owner.is_gone]
                if alive:
                    raise self._refusal(alive[-1]) from None
            except OSError as error:
                if error.errno not in _NO_FLOCK:
                    raise
                return
            else:
                return
            # Nobody's record: who holds it looks for a moment only (`has_owner`), or has not written it yet.
            time.sleep(_TRY_SECONDS)
        raise self._refusal(None)

    def _follow(self) -> bool:
        """Outwait the owners and follow them; return False where another process was faster."""
        judged = _records(self._path)
        for file, text in judged.items():
            self._outwait(file, text)
        file = self._path / f".forge-owner-{max(map(_number, judged), default=0) + 1}"
        try:
            self._make(file)
        except FileExistsError:
            return False
        self._file, self._verified = file, since_boot()
        if {name: text for name, text in _records(self._path).items() if name != file} != judged:
            # Somebody began meanwhile, or woke up: nobody may be sure to be alone, so this one goes back.
            file.unlink()
            os.close(self._descriptor)
            self._file, self._descriptor = None, -1
            time.sleep(random.random() * self._lease / _LOOKS)  # noqa: S311 - no secret
            return False
        for other, text in judged.items():
            with contextlib.suppress(FileNotFoundError):
                other.unlink()
            if (owner := Owner.read(text)) is not None and not owner.is_gone:
                self.followed = f"took over {self._path} from {owner} and stood still for {owner_lease(owner):g} s"
        return True

    def _outwait(self, file: Path, text: bytes) -> None:
        """Return once an owner is gone, or stood still for its lease.

        Raises:
            RunDirectoryError: it lives.

        """
        owner = Owner.read(text)
        if owner is not None and owner.is_gone:
            return
        lease = self._lease if owner is None else owner_lease(owner)
        self._say(
            f"{self._said}: belongs to {owner or 'an owner whose record cannot be read'}; watching for up to {lease:g} s "
            "whether it still does"
        )
        pause, still, last = lease / _LOOKS, 0.0, time.monotonic()
        while still < lease:
            time.sleep(pause)
            now = time.monotonic()
            # Time in which this process did not run, or the file system did not answer, is nobody's silence.
            still, last = still + min(now - last, 2 * pause), now
            try:
                found = _read(file)
            except FileNotFoundError:
                return
            if found != text:
                raise self._refusal(Owner.read(found) or owner)
            if owner is not None and owner.is_gone:
                return

    def _refusal(self, owner: Owner | None) -> RunDirectoryError:
        who = "" if owner is None else f": {owner}"
        return RunDirectoryError(f"{self._said}: {self._busy}{who}. {self._remedy}".rstrip())

    def _make(self, file: Path) -> None:
        """Make a record that is not there yet, whole or not at all."""
        self._descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            # Whoever comes must be able to read who is there, whatever this process's umask says.
            with contextlib.suppress(PermissionError):
                os.fchmod(self._descriptor, 0o644)
            self._renew()
        except BaseException:
            os.close(self._descriptor)
            self._descriptor = -1
            with contextlib.suppress(OSError):
                file.unlink()
            raise

    def _renew(self) -> None:
        """Count up in the record. In place: a record that was removed must not come back."""
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")
        self._owner = attrs.evolve(self._owner, renewals=self._owner.renewals + 1, renewed=now)
        text = self._owner.to_bytes()
        if os.pwrite(self._descriptor, text, 0) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.fsync(self._descriptor)  # or another host would see it only later
        except OSError as error:
            if error.errno not in _NO_FLOCK:  # a file system without it
                raise

    def _keep(self) -> None:
        """Renew the lease until the end."""
        while not self._ended.wait(self._lease / _RENEWALS):
            now = since_boot()
            try:
                if not self._is_ours():
                    self.lost = True
                    return
                self._renew()
                self._verified = now
            except OSError:
                # A full disk, a server that is away: what is written next is checked by itself.
                continue

    def _is_ours(self) -> bool:
        """Read whether the record is there, and this process's own."""
        assert self._file is not None
        try:
            found = Owner.read(self._file.read_bytes())
        except OSError as error:
            if error.errno in _GONE:
                return False
            raise
        return found is not None and found.token == self._owner.token

    def _successor(self) -> str:
        """Say who owns the directory now."""
        with contextlib.suppress(OSError):
            for text in reversed(_records(self._path).values()):
                if (owner := Owner.read(text)) is not None and owner.token != self._owner.token:
                    return (
                        f"{owner} took it over, because this one had not renewed its lease for {self._lease:g} s (it was "
                        "stopped, asleep or cut off from the directory)."
                    )
        return f"its record {self._file} is gone: another run took it over and ended, or somebody removed it."


def unwritable(said: str, error: OSError) -> RunDirectoryError:
    """Return the error of a directory, named as in `said`, that this process cannot write to."""
    remedy = "Give a directory that you may write to."
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "Make room, or give another directory."
    elif error.errno == errno.EROFS:
        remedy = "Give a directory of a file system that can be written to."
    elif error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
        remedy = "The disk, or the server behind it, fails: see to it, or give another directory."
    return RunDirectoryError(f"{said}: cannot be written: {error.strerror or error}. {remedy}")


def owner_lease(owner: Owner) -> float:
    """Return the lease of an owner, in seconds, and at most the longest there is."""
    return owner.lease if 0 < owner.lease <= _LEASE_SECONDS else _LEASE_SECONDS


def _records(path: Path) -> dict[Path, bytes]:
    """Return the records in a directory by number, each with its bytes."""
    found = {}
    for file in sorted((path / name for name in os.listdir(path) if _RECORD.fullmatch(name)), key=_number):
        with contextlib.suppress(FileNotFoundError):
            found[file] = _read(file)
    return found


def _read(file: Path) -> bytes:
    """Read a record.

    Raises:
        RunDirectoryError: it is something else than a file: a pipe would be waited for, and a link may lead anywhere.

    """
    if not stat.S_ISREG(file.lstat().st_mode):
        raise RunDirectoryError(f"{file}: is no file, and a run has the record of its owner there. Remove it.")
    with file.open("rb") as opened:
        return opened.read(_MOST_BYTES)


def _number(file: Path) -> int:
    return int(file.name.rpartition("-")[2])
