"""A worker's exception → a file → the same exception; and which of several failures was the first."""

import json
import signal
from pathlib import Path

import pytest

from forge_dist import ExportError, ModelError, WorkerError, worker_report
from forge_dist.launching._root_cause import Failure, error_of, report_of, root_cause
from forge_dist.ranks._failure_report import failure_report, read_report, rebuild_exception


@pytest.fixture
def report(tmp_path, monkeypatch):
    """The file that a launcher named, for rank 2."""
    path = tmp_path / "report.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    monkeypatch.setenv("RANK", "2")
    monkeypatch.delenv("FORGE_LAUNCHER_PID", raising=False)
    monkeypatch.setattr("faulthandler.enable", lambda: None)
    return path


def test_an_exception_goes_there_and_on(report):
    """The exception is written and propagates as it is; the file is in torch's format too, so that torchrun shows it."""
    error = ExportError("the disk is full")
    with pytest.raises(ExportError) as caught, worker_report():
        raise error
    assert caught.value is error
    data = json.loads(report.read_text())
    assert data["message"]["message"] == "ExportError: the disk is full"
    assert data["message"]["extraInfo"]["py_callstack"].startswith("Traceback")
    assert int(data["message"]["extraInfo"]["timestamp"]) > 1_700_000_000
    made = rebuild_exception(read_report(report))
    assert type(made) is ExportError
    assert str(made).startswith("the disk is full (rank 2 on ")


def test_no_launcher_no_file(monkeypatch, tmp_path):
    """Without a launcher there is nobody to write for."""
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(KeyError), worker_report():
        raise KeyError("x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("code", "written"), [(0, False), (None, False), (75, False), (4, True), ("text", True)])
def test_exit_statuses(report, code, written):
    """A plain end and a preemption are no failures; other statuses, and text, are. A foreign launcher
    gets the status itself.
    """
    with pytest.raises(SystemExit) as caught, worker_report():
        raise SystemExit(code)
    assert caught.value.code == code
    assert report.exists() is written


class TwoArguments(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")


class OwnStatus(Exception):
    exit_status = 7


class AFamily(Exception):
    """Named by the caller."""


class OfAFamily(AFamily):
    exit_status = 3


@pytest.mark.parametrize(
    ("error", "kind", "statement"),
    [
        (ModelError("no such model"), ModelError, "no such model (rank 1 on here)"),
        (ValueError("bad"), ValueError, "bad (rank 1 on here)"),
        (KeyError("key"), KeyError, ""),
        (MemoryError(), MemoryError, "(rank 1 on here)"),
        (TwoArguments(1, 2), WorkerError, "rank 1 on here ended: TwoArguments: 1 2"),
        (UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), WorkerError, "UnicodeDecodeError"),
        (KeyboardInterrupt(), WorkerError, "KeyboardInterrupt"),
        (SystemExit(3), WorkerError, "left with exit status 3, by sys.exit(3)"),
        (OwnStatus("x"), WorkerError, "rank 1 on here ended: OwnStatus: x"),
        (AFamily("x"), AFamily, "x (rank 1 on here)"),
        (OfAFamily("x"), OfAFamily, "x (rank 1 on here)"),
    ],
)
def test_it_is_made_again(error, kind, statement):
    """Class and message are the worker's own where the class is known and one text makes it; otherwise a WorkerError names
    both. Statuses are kept.
    """
    made = rebuild_exception(json.loads(json.dumps(failure_report(error, rank=1, host="here"))), [AFamily])
    assert type(made) is kind
    assert statement in str(made)
    assert any("Traceback of rank 1 on here:" in note for note in made.__notes__)
    status = 3 if isinstance(error, SystemExit) else getattr(error, "exit_status", None)
    if status is not None:
        assert made.exit_status == status


def test_only_exceptions_are_made():
    """A report that names something else is not called."""
    entry = failure_report(ValueError("x"), rank=0, host="h") | {"module": "os", "class": "system", "text": "false"}
    assert type(rebuild_exception(entry)) is WorkerError
    entry |= {"module": "builtins", "class": "BaseException"}
    assert type(rebuild_exception(entry)) is WorkerError


@pytest.mark.parametrize("text", ["", "{", "[]", '{"forge": 3}', '{"message": {}}'])
def test_half_a_report_is_none(tmp_path, text):
    """A file that is no report counts as none."""
    (tmp_path / "r").write_text(text)
    assert read_report(tmp_path / "r") is None
    assert read_report(tmp_path / "absent") is None


def test_consequences_are_told_from_causes():
    """Closed connections and other ranks' ends are consequences; a package's own errors are not, whatever their text says."""
    follows = [
        RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:25520"),
        ConnectionResetError(104, "Connection reset by peer"),
        WorkerError("rank 0 on h ended: ValueError: x"),
    ]
    first = [
        ValueError("connection closed by peer"),
        RuntimeError("shapes do not fit"),
        ExportError("gloo"),
        OSError(28, "No space"),
    ]
    assert [failure_report(error)["consequence"] for error in follows] == [True] * 3
    assert [failure_report(error)["consequence"] for error in first] == [False] * 4


def failed(rank, exitcode, ended, error=None, said_at=None, **more):
    reported = None if error is None else failure_report(error, rank=rank, host="h") | {"time": said_at or ended}
    return Failure(rank=rank, host="h", exitcode=exitcode, ended=ended, report=reported, log=Path("rank.log"), **more)


CLOSED = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("failures", "rank"),
    [
        # An exception; a connection that closed because of it but ended sooner; a third that was asked to end.
        ([failed(0, 1, 10.0, CLOSED, 9.9), failed(1, 1, 11.0, ValueError("x"), 9.8), failed(2, -15, 12.0)], 1),
        # A rank was killed; another noticed before the launcher did.
        ([failed(0, 1, 10.2, CLOSED, 9.9), failed(1, -9, 10.0)], 1),
        # Two exceptions: the first.
        ([failed(0, 1, 10.0, ValueError("x"), 9.9), failed(1, 1, 9.95, ValueError("y"), 9.8)], 1),
        # One hung on and was killed for it, which is no cause.
        ([failed(0, -9, 15.0, killed_by_launcher=True), failed(1, 1, 10.0, CLOSED)], 1),
        ([failed(0, -15, 10.0), failed(1, 9, 10.0)], 1),
        # Somebody outside sent SIGTERM: that process ended first of all.
        ([failed(0, 1, 10.4, CLOSED, 10.1), failed(1, -15, 10.0)], 1),
        # The heartbeat ended one, the agent the other.
        ([failed(0, 1, 10.0, WorkerError("host b was not heard of"), 9.9), failed(1, -15, 10.3)], 0),
    ],
)
def test_the_cause(failures, rank):
    """Of several failures the one that the others follow from is found, in whatever order they are listed."""
    assert root_cause(failures).rank == rank
    assert root_cause(failures[::-1]).rank == rank


def test_a_rank_without_a_report(tmp_path):
    """A signal and a status are named, with the log and its end."""
    log = tmp_path / "rank_1.log"
    log.write_text("".join(f"line {number}\n" for number in range(20)))
    failure = Failure(rank=1, host="h", exitcode=-int(signal.SIGSEGV), ended=1.0, report=None, log=log)
    error = error_of(report_of(failure))
    assert type(error) is WorkerError
    end = "".join(f"\nline {number}" for number in range(12, 20))
    assert str(error) == f"rank 1 on h was killed by SIGSEGV; its log: {log}\nThe log ends with:{end}"
