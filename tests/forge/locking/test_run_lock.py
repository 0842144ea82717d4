"""One owner of a run directory, also where the kernel's lock does not see the other host.

`blind` takes the kernel's lock away, as a network's file system does, or a second mount of one directory. `elsewhere` makes a
lock of this process one of another host.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from forge import RunDirectoryError, RunTakenOverError
from forge.locking import _run_lock
from forge.locking._run_lock import RunLock, has_owner, is_record

LEASE = "1.2"


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    """No lock of the kernel, and a short lease."""
    monkeypatch.setattr(_run_lock.fcntl, "flock", lambda *_: None)
    monkeypatch.setenv("FORGE_LEASE_SECONDS", LEASE)


def elsewhere(path: Path, said: list[str] | None = None) -> RunLock:
    """A lock that another host would take."""
    lock = RunLock(path, name="ckpt_output_dir", say=(said if said is not None else []).append)
    lock._owner = attrs.evolve(lock._owner, host="host-b", space="boot-b pid:[1]")
    return lock


@pytest.fixture
def owner(tmp_path: Path, blind: None) -> Iterator[RunLock]:
    """A living owner on another host."""
    with elsewhere(tmp_path) as lock:
        yield lock


def records(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path) if is_record(name))


def fall_silent(lock: RunLock) -> None:
    """Its process is stopped: nothing renews the lease."""
    lock._ended.set()
    assert lock._thread is not None
    lock._thread.join()


def test_a_living_owner_of_another_host_is_left_alone(owner: RunLock, tmp_path: Path) -> None:
    """It goes on counting: the second is refused, and told who it is and when it last renewed its lease."""
    said: list[str] = []
    with pytest.raises(RunDirectoryError) as caught:
        RunLock(tmp_path, name="ckpt_output_dir", say=said.append).acquire()
    message = str(caught.value)
    assert message.startswith(
        f"ckpt_output_dir {tmp_path}: another run is writing to it now: process {os.getpid()} on host-b"[:60]
    )
    assert "on host host-b, which last renewed its lease at 20" in message
    assert message.endswith("Give another directory, or wait for that run.")
    (line,) = said
    assert f"belongs to process {os.getpid()} on host host-b" in line
    assert f"watching for up to {LEASE} s" in line
    owner.check()
    assert records(tmp_path) == [".forge-owner-1"]


@pytest.mark.slow
def test_a_silent_owner_is_followed_and_writes_nothing_more(owner: RunLock, tmp_path: Path) -> None:
    """After its lease another takes over; the first finds that out before it writes, and touches nothing of the other's."""
    fall_silent(owner)
    with RunLock(tmp_path, say=[].append) as second:
        assert f"process {os.getpid()} on host host-b" in second.followed
        assert second.followed.endswith(f" UTC by its own clock and stood still for {LEASE} s")
        assert records(tmp_path) == [".forge-owner-2"]
        for check in (owner.check, owner.check_lately):
            with pytest.raises(RunTakenOverError, match=r"lost it and ends without writing anything more: process \d+ on host"):
                check()
        assert owner.lost
        owner.release()
        second.check()
        assert records(tmp_path) == [".forge-owner-2"]
    assert records(tmp_path) == []


def test_the_thread_of_a_lost_owner_finds_out_by_itself(owner: RunLock, tmp_path: Path) -> None:
    """A record that is gone is not written again: it would pass for a living owner's."""
    (tmp_path / ".forge-owner-1").unlink()
    owner._thread.join(300)
    assert owner.lost
    with pytest.raises(
        RunTakenOverError, match="its record .* is gone: another run took it over and ended, or somebody removed"
    ):
        owner.check_lately()
    assert records(tmp_path) == []


HOLD = """
import fcntl, os, sys, time
from pathlib import Path
if "blind" in sys.argv:
    fcntl.flock = lambda *_: None
from forge.locking._run_lock import RunLock
RunLock(Path(sys.argv[1])).acquire()
print("in", flush=True)
time.sleep(600)
"""


def holder(path: Path, *words: str, before: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process that owns a directory."""
    process = subprocess.Popen([*before, sys.executable, "-c", HOLD, str(path), *words], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    process.stdout.close()
    return process


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("blind",)])
def test_a_killed_owner_of_this_host_is_followed_at_once(words: tuple[str, ...], tmp_path: Path) -> None:
    """kill -9: its death is proved, nothing is waited for, with or without a lock of the kernel."""
    process = holder(tmp_path, *words)
    process.kill()
    process.wait()
    said: list[str] = []
    with RunLock(tmp_path, say=said.append) as lock:
        assert said == []
        assert lock.followed == ""


@pytest.mark.slow
def test_a_living_owner_of_this_host_is_refused_at_once(tmp_path: Path) -> None:
    """Where the kernel's lock works it is enough, and the record says whose it is, even of a process that is stopped."""
    process = holder(tmp_path)
    try:
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RunDirectoryError, match=f"another run is writing to it now: process {process.pid} on host"):
            RunLock(tmp_path, say=pytest.fail).acquire()
        assert has_owner(tmp_path)
    finally:
        process.kill()
        process.wait()
    assert not has_owner(tmp_path)


def test_a_command_says_it_in_its_own_words(tmp_path: Path) -> None:
    """`forge track` takes the same lock, and a report that is made meanwhile shows the run as one that goes on."""
    with RunLock(tmp_path):
        busy = RunLock(tmp_path, busy="this run goes on at this moment, and sends its record itself", remedy="")
        with pytest.raises(RunDirectoryError) as caught:
            busy.acquire()
        assert has_owner(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}: this run goes on at this moment, and sends its record itself: process ")
    assert str(caught.value).endswith(" UTC by its own clock.")
    assert not has_owner(tmp_path)


def test_an_owner_of_another_host_is_shown_while_it_renews(tmp_path: Path) -> None:
    """Nobody can ask it: its last renewal tells, by the clock of the file system, and decides nothing."""
    record = tmp_path / ".forge-owner-1"
    record.write_bytes(attrs.evolve(RunLock(tmp_path)._owner, space="boot-b").to_bytes())
    assert has_owner(tmp_path)
    os.utime(record, (1, 1))
    assert not has_owner(tmp_path)
    assert not has_owner(tmp_path / "absent")


def test_a_look_keeps_nobody_out(tmp_path: Path) -> None:
    """A report that asks at this very moment whether there is an owner is none."""
    (tmp_path / ".forge-owner-1").write_bytes(attrs.evolve(RunLock(tmp_path)._owner, pid=2**40).to_bytes())
    look = os.open(tmp_path, os.O_RDONLY)
    _run_lock.fcntl.flock(look, _run_lock.fcntl.LOCK_SH)
    threading.Timer(0.2, os.close, (look,)).start()
    with RunLock(tmp_path, say=pytest.fail) as lock:
        lock.check()


def test_a_lock_without_a_record_is_another_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version leaves no record, and its lock counts."""
    monkeypatch.setattr(_run_lock, "_TRIES", 3)
    held = os.open(tmp_path, os.O_RDONLY)
    _run_lock.fcntl.flock(held, _run_lock.fcntl.LOCK_EX)
    try:
        with pytest.raises(RunDirectoryError, match="another run is writing to it now. Give another directory"):
            RunLock(tmp_path).acquire()
    finally:
        os.close(held)


@pytest.mark.slow
def test_a_process_of_another_container_is_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another namespace of processes on this host: its number means nothing here, so its death is not proved."""
    inside = ("unshare", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")
    if shutil.which("unshare") is None or subprocess.run([*inside, "true"], check=False, capture_output=True).returncode:
        pytest.skip("no namespaces of processes here")
    monkeypatch.setenv("FORGE_LEASE_SECONDS", LEASE)
    process = holder(tmp_path, "blind", before=inside)
    process.kill()
    process.wait()
    said: list[str] = []
    with RunLock(tmp_path, say=said.append) as lock:
        assert "watching for up to" in said[0]
        assert "stood still" in lock.followed


@pytest.mark.usefixtures("blind")
def test_one_of_several_follows(tmp_path: Path) -> None:
    """However many find a directory without a living owner at the same moment, one of them gets it."""
    for left in (False, True):
        folder = tmp_path / str(left)
        folder.mkdir()
        if left:
            (folder / ".forge-owner-7").write_bytes(attrs.evolve(RunLock(folder)._owner, pid=2**40).to_bytes())
        locks, outcomes = [elsewhere(folder) for _ in range(6)], []
        started = threading.Barrier(len(locks))

        def take(lock: RunLock, started: Any = started, outcomes: list[Any] = outcomes) -> None:
            started.wait()
            try:
                lock.acquire()
            except RunDirectoryError as error:
                outcomes.append(error)
            else:
                outcomes.append(lock)

        threads = [threading.Thread(target=take, args=(lock,)) for lock in locks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (winner,) = [each for each in outcomes if isinstance(each, RunLock)]
        winner.check()
        assert len(outcomes) == len(locks)
        assert records(folder) == [winner._file.name]
        winner.release()


@pytest.mark.usefixtures("blind")
def test_a_number_that_came_back_is_another_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged dead, followed, let go, and owned anew under its number meanwhile: the new owner is not robbed."""
    dead = attrs.evolve(RunLock(tmp_path)._owner, pid=2**40)
    (tmp_path / ".forge-owner-1").write_bytes(dead.to_bytes())
    late, newcomer = elsewhere(tmp_path), elsewhere(tmp_path)
    make = RunLock._make

    def made(lock: RunLock, file: Path) -> None:
        if lock is late and not newcomer._file:
            (tmp_path / ".forge-owner-1").unlink()
            newcomer.acquire()
        make(lock, file)

    monkeypatch.setattr(RunLock, "_make", made)
    with pytest.raises(RunDirectoryError, match="another run is writing"):
        late.acquire()
    newcomer.check()
    assert records(tmp_path) == [".forge-owner-1"]
    newcomer.release()


@pytest.mark.slow
@pytest.mark.usefixtures("blind")
@pytest.mark.parametrize("text", [b"", b"\x1b[2J{", b'{"lease": 1e9}'])
def test_a_torn_record_is_outwaited(text: bytes, tmp_path: Path) -> None:
    """A kill between making a record and writing it leaves an empty one, which keeps nobody out for longer than a lease."""
    (tmp_path / ".forge-owner-3").write_bytes(text)
    with RunLock(tmp_path, say=[].append):
        assert records(tmp_path) == [".forge-owner-4"]


@pytest.mark.parametrize(
    "make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to(path)]
)
def test_something_else_in_the_place_of_a_record(make: Callable[[Path], None], tmp_path: Path) -> None:
    """A pipe, a folder or a link is named at once: a pipe would be waited for without end. Who only looks sees no owner."""
    make(tmp_path / ".forge-owner-1")
    with pytest.raises(RunDirectoryError, match=r"\.forge-owner-1: is no file, and a run has the record .* Remove it\."):
        RunLock(tmp_path).acquire()
    assert not has_owner(tmp_path)


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS])
def test_a_file_system_without_locks_is_no_other_run(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS has no flock for directories: the record alone keeps others out, and nobody is told of another run."""

    def flock(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(_run_lock.fcntl, "flock", flock)
    with RunLock(tmp_path) as lock:
        lock.check()
        assert records(tmp_path) == [".forge-owner-1"]


@pytest.mark.parametrize(
    ("call", "number", "message"),
    [
        ("flock", errno.EIO, "cannot be written: Input/output error. The disk, or the server behind it, fails"),
        ("open", errno.EROFS, "cannot be written: Read-only file system. Give a directory of a file system that can be"),
        ("open", errno.EACCES, "cannot be written: Permission denied. Give a directory that you may write to"),
        ("open", errno.ENOSPC, "cannot be written: No space left on device. Make room"),
        ("pwrite", errno.EDQUOT, "cannot be written: Disk quota exceeded. Make room"),
        ("fsync", errno.EIO, "cannot be written: Input/output error"),
    ],
)
def test_an_error_says_what_it_is(
    call: str, number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read-only or full disk, or no permission, is not another run; nothing is left behind."""
    module: Any = _run_lock.fcntl if call == "flock" else _run_lock.os
    true: Callable[..., Any] = getattr(module, call)

    def planted(*given: Any) -> Any:
        if call == "open" and not given[1] & os.O_CREAT:
            return true(*given)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(module, call, planted)
    with pytest.raises(RunDirectoryError, match=message):
        RunLock(tmp_path).acquire()
    assert list(tmp_path.iterdir()) == []


def test_no_umask_hides_the_owner(tmp_path: Path) -> None:
    """Whoever may come must be able to read who is there."""
    before = os.umask(0o777)
    try:
        with RunLock(tmp_path):
            assert stat.S_IMODE((tmp_path / ".forge-owner-1").stat().st_mode) == 0o644
    finally:
        os.umask(before)


def test_no_clock_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of the day that jumps changes nothing: it is never asked."""
    monkeypatch.setattr(_run_lock.time, "time", pytest.fail)
    (tmp_path / ".forge-owner-1").write_bytes(attrs.evolve(RunLock(tmp_path)._owner, pid=2**40).to_bytes())
    os.utime(tmp_path / ".forge-owner-1", (2**32, 2**32))
    with RunLock(tmp_path) as lock:
        lock.check()
        lock.check_lately()


def test_a_step_costs_a_look_at_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written with each step reads the record only where nobody has for a quarter of the lease."""
    with RunLock(tmp_path) as lock:
        looked: list[int] = []
        monkeypatch.setattr(lock, "_is_ours", lambda: looked.append(1) or True)
        for _ in range(100):
            lock.check_lately()
        assert looked == []
        lock._verified -= lock._lease / 4 + 1
        lock.check_lately()
        assert looked == [1]
        lock.check()
        assert looked == [1, 1]


RUN = """
import fcntl, sys, time
fcntl.flock = lambda *_: None
from forge._errors import ForgeError
from forge.run._run_directory import RunDirectory
try:
    with RunDirectory(sys.argv[1]) as out:
        out.publish("seed: 1\\n")
        for step in range(10**6):
            out.began = True
            out.metrics({"step": step})
            out.log(f"step {step}")
            time.sleep(0.01)
except ForgeError as error:
    print(type(error).__name__, error.exit_status, error, flush=True)
"""


@pytest.mark.slow
@pytest.mark.usefixtures("blind")
def test_a_run_that_was_stopped_past_its_lease_writes_nothing(tmp_path: Path) -> None:
    """Two runs by two paths of one directory: the first is stopped, the second follows, the first wakes up and ends."""
    from forge.run._run_directory import RunDirectory

    first, second = tmp_path / "mount-a" / "run", tmp_path / "mount-b" / "run"
    first.mkdir(parents=True)
    (tmp_path / "mount-b").symlink_to(tmp_path / "mount-a")
    process = subprocess.Popen([sys.executable, "-c", RUN, str(first)], stdout=subprocess.PIPE, text=True)
    try:
        while not (first / "metrics.jsonl").exists() or (first / "metrics.jsonl").stat().st_size < 500:
            time.sleep(0.02)
        with pytest.raises(RunDirectoryError, match="another run is writing"), RunDirectory(second):
            pass
        process.send_signal(signal.SIGSTOP)
        with RunDirectory(second) as out:
            assert out.resuming
            out.publish("seed: 1\n")
            out.metrics({"step": 0})

            def content() -> dict[str, bytes]:
                return {file.name: file.read_bytes() for file in first.iterdir() if file.is_file() and not is_record(file.name)}

            before = content()
            assert any(b"took over" in line for line in before["log.txt"].splitlines())
            process.send_signal(signal.SIGCONT)
            said, _ = process.communicate(timeout=300)
            assert said.startswith("RunTakenOverError 1 ckpt_output_dir")
            assert f"process {os.getpid()} on host" in said
            assert content() == before
            out.metrics({"step": 1})
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


@pytest.mark.slow
def test_a_read_only_file_system_is_called_so(tmp_path: Path) -> None:
    """A real mount that cannot be written: the message says so, and speaks of no other run."""
    inside = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o ro tmpfs {tmp_path}"
    if shutil.which("unshare") is None or subprocess.run([*inside, mount], check=False, capture_output=True).returncode:
        pytest.skip("no mounts here")
    ended = subprocess.run(
        [*inside, f'{mount} && exec "$0" -c "$1" "$2"', sys.executable, HOLD, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"{tmp_path}: cannot be written: Read-only file system." in ended.stderr
