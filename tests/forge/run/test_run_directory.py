"""A run directory is complete or not there."""

from __future__ import annotations

import datetime
import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forge_dist
from forge import RunDirectoryError, RunTakenOverError, RunWriteError, SettingsError, _clock
from forge.reports._record import active_seconds, device_seconds
from forge.run._run_directory import RunDirectory
from forge.saving._directories import remove_at_once


def lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a JSONL file, which holds nothing but valid JSON."""
    return [json.loads(line, parse_constant=pytest.fail) for line in file.read_text().splitlines()]


def test_nothing_is_left_of_a_run_that_never_began(tmp_path: Path) -> None:
    """An error before `publish` removes what was prepared and the directories that were made for it."""
    with pytest.raises(ValueError, match="bad data"), RunDirectory(tmp_path / "a" / "b") as out:
        (out.root / "data").mkdir()
        out.log("something")
        raise ValueError("bad data")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_directory_of_the_user_is_kept(tmp_path: Path) -> None:
    """A directory that was there before is there after, as empty as it was."""
    with pytest.raises(ValueError, match="x"), RunDirectory(tmp_path):
        raise ValueError("x")
    assert list(tmp_path.iterdir()) == []


def test_publish_moves_everything(tmp_path: Path) -> None:
    """After `publish` everything is in its place, and the open files are appended to."""
    with RunDirectory(tmp_path / "run") as out:
        (out.root / "data").mkdir()
        out.log("before")
        out.publish("seed: 1\n")
        out.log("after")
        out.metrics({"step": 1})
        assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["step"] == 1, "flushed at once"
    names = ["config.yaml", "data", "events.jsonl", "log.txt", "metrics.jsonl", "report.html"]
    assert sorted(entry.name for entry in (tmp_path / "run").iterdir()) == names
    assert [line.split("  ")[1] for line in (tmp_path / "run" / "log.txt").read_text().splitlines()] == ["before", "after"]


@pytest.mark.slow
def test_what_a_run_made_stays_where_it_replaces_one_without_steps(tmp_path: Path) -> None:
    """At its final place already, as the adapter that it goes on from; what is the former run's alone goes."""
    for name in ("adapter", "osft"):
        (tmp_path / name).mkdir()
    (tmp_path / "config.yaml").write_text("model_path: m\n")
    for name in ("metrics.jsonl", "log.txt", "events.jsonl"):
        (tmp_path / name).touch()
    with RunDirectory(tmp_path) as out:
        assert out.resuming
        assert not out.has_steps
        out.place("adapter")
        out.replace()
        out.publish("seed: 1\n")
        out.began = True
    assert (tmp_path / "adapter").is_dir()
    assert not (tmp_path / "osft").exists()


def test_the_lock_dies_with_its_owner(tmp_path: Path) -> None:
    """A run killed with SIGKILL while preparing leaves a directory that the next run takes over."""
    code = (
        "import os, sys\nfrom forge.run._run_directory import RunDirectory\n"
        "with RunDirectory(sys.argv[1]) as out:\n    out.log('x')\n    os.kill(os.getpid(), 9)"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], env=os.environ, check=False)
    assert killed.returncode == -9
    with RunDirectory(tmp_path / "run") as out:
        assert not (out.root / "log.txt").read_text()
        out.publish("")


def test_two_at_once(tmp_path: Path) -> None:
    """The second of two runs on one directory is refused and does not disturb the first."""
    with RunDirectory(tmp_path / "run") as first:
        with pytest.raises(RunDirectoryError, match="another run is writing"), RunDirectory(tmp_path / "run"):
            pass
        assert (first.root / "log.txt").exists()


def test_what_is_there_is_refused(tmp_path: Path) -> None:
    """Another run, other files, or a file in the place of the directory: refused by name, untouched."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "a.tex").touch()
    (tmp_path / "file").touch()
    (tmp_path / "finished" / "hf_format").mkdir(parents=True)
    (tmp_path / "finished" / "config.yaml").touch()
    for name, message in (
        ("run", "holds another run, which made no export, and resume=never"),
        ("finished", r"holds another run, and resume=never\. Give"),
        ("thesis", r"a\.tex"),
        ("file", "is a file"),
    ):
        with pytest.raises(RunDirectoryError, match=message), RunDirectory(tmp_path / name, resume="never"):
            pass
    assert (tmp_path / "thesis" / "a.tex").exists()
    assert (tmp_path / "file").is_file()


def test_home_and_dots_are_resolved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~` and `..` name one place for everything in the run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with RunDirectory("~/a/../run") as out:
        out.publish("")
        assert out.root == tmp_path / "run"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(("began", "kept"), [(False, False), (True, True)])
def test_a_refusal_before_the_first_step_leaves_nothing(began: bool, kept: bool, tmp_path: Path) -> None:
    """Bad input that shows only once the model is loaded leaves nothing either, until a step was made."""
    with pytest.raises(SettingsError), RunDirectory(tmp_path / "a" / "run") as out:
        (out.root / "data").mkdir()
        out.publish("")
        out.began = began
        raise SettingsError("no")
    assert (tmp_path / "a").exists() == kept


def test_a_failure_after_publishing_is_kept_and_named(tmp_path: Path) -> None:
    """A failed run stays, and the log's last line says how it ended."""
    with pytest.raises(RuntimeError), RunDirectory(tmp_path / "run") as out:
        out.publish("")
        raise RuntimeError("boom")
    assert (tmp_path / "run" / "log.txt").read_text().endswith("failed: RuntimeError: boom\n")


def test_a_full_disk_is_reported_with_the_file(tmp_path: Path) -> None:
    """A full disk fails the run (status 1) with the name of the file; closing the run does not hide it."""
    full = open("/dev/full", "w")  # noqa: SIM115 - closed by the run directory
    with pytest.raises(RunWriteError, match=r"metrics\.jsonl.*No space left") as caught, RunDirectory(tmp_path / "run") as out:
        out.publish("")
        out._files["metrics.jsonl"].close()
        out._files["metrics.jsonl"] = full
        out.metrics({"step": 1})
    assert full.closed
    assert caught.value.exit_status == 1


def test_somebodys_files_are_never_removed(tmp_path: Path) -> None:
    """Undoing removes what the run made, and only that."""
    (tmp_path / "run").mkdir()
    with pytest.raises(SettingsError), RunDirectory(tmp_path / "run") as out:
        (tmp_path / "run" / "mine").touch()
        out.publish("")
        raise SettingsError("no")
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == ["mine"]


@pytest.mark.parametrize("name", ["a\0b", "\udcff", "a\nforge: finished", "a\x1b[2J", "\x9b2J"])
def test_names_that_no_file_can_hold(name: str, tmp_path: Path) -> None:
    """A name with a NUL or a control character, or one that is not UTF-8, is refused before any work is done."""
    with pytest.raises(RunDirectoryError, match="the name ") as caught:
        RunDirectory(f"{tmp_path}/{name}")
    assert str(caught.value).isprintable()
    assert list(tmp_path.iterdir()) == []


def test_times_are_durations_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set back while a run trains moves none of its times: they follow the time since boot."""
    real = _clock.since_boot
    with RunDirectory(tmp_path / "run") as out:
        out.publish("seed: 1\n")
        out.metrics({"step": 1})
        out.log("a line", event="saved")
        monkeypatch.setattr(_clock, "since_boot", lambda: real() + 3600)
        monkeypatch.setattr("time.time", lambda: 0.0)
        out.metrics({"step": 2})
        out.log("a line", event="saved")
    files = (tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "events.jsonl")
    for first, second in ([json.loads(line)["time"] for line in file.read_text().splitlines()[-2:]] for file in files):
        apart = datetime.datetime.fromisoformat(second) - datetime.datetime.fromisoformat(first)
        assert 3600 <= apart.total_seconds() < 3605


def test_a_clock_that_went_back_between_two_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start on a machine whose clock is an hour behind goes on from the run's last line, so that the report adds up both."""
    monkeypatch.setattr(_clock, "_shift", 0.0)
    with RunDirectory(tmp_path / "run") as out:
        out.publish("seed: 1\n")
        out.log("begins", event="started")
        out.metrics({"step": 1})
    with (tmp_path / "run" / "metrics.jsonl").open("a") as torn:
        torn.write('{"time": "20')
    real = _clock.since_boot
    monkeypatch.setattr(_clock, "since_boot", lambda: real() - 3600)
    with RunDirectory(tmp_path / "run") as out:
        out.publish("seed: 1\n")
        out.log("goes on", event="resumed")
        monkeypatch.setattr(_clock, "since_boot", lambda: real() - 3600 + 50)
        out.log("a line", event="saved")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["started", "clock", "resumed", "saved"]
    assert "the clock is 3,600 s behind the run's last line" in events[1]["text"]
    assert sorted(event["time"] for event in events) == [event["time"] for event in events]
    assert active_seconds(events, []) == pytest.approx(50, abs=5)
    with RunDirectory(tmp_path / "another") as out:
        out.publish("seed: 1\n")
        out.log("begins", event="started")
    (begins,) = [json.loads(line) for line in (tmp_path / "another" / "events.jsonl").read_text().splitlines()]
    assert begins["time"] < events[0]["time"], "another run of the process has the machine's own time"


@pytest.mark.parametrize("last", ["9999-12-31T23:59:59.999999+00:00", "9999-12-31T23:59:59-11:00", "9999-12-31T23:59:58+00:00"])
def test_a_clock_that_was_at_the_end_of_time(last: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start whose clock stood in the year 9999 ends no later one, and adds no more hours than it took."""
    monkeypatch.setattr(_clock, "_shift", 0.0)
    with RunDirectory(tmp_path / "run") as out:
        out.publish("seed: 1\n")
        out.log("begins", event="machine", ranks=1, device="cpu")
        out.log("begins", event="started")
    ahead = [{"time": "9999-12-31T00:00:00+00:00", "event": "machine", "ranks": 1, "device": "cpu"}]
    ahead += [{"time": "9999-12-31T00:00:00+00:00", "event": "resumed"}, {"time": last, "event": "saved"}]
    with (tmp_path / "run" / "events.jsonl").open("a") as events:
        events.writelines(json.dumps(each) + "\n" for each in ahead)
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": last}) + "\n")
    for _ in range(2):
        with RunDirectory(tmp_path / "run") as out:
            out.publish("seed: 1\n")
            out.log("goes on", event="machine", ranks=1, device="cpu")
            out.log("goes on", event="resumed")
            out.metrics({"step": 2})
            out.log("a line", event="saved")
    found = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    seconds = active_seconds(found, [(last, last)])
    assert seconds is not None
    assert 0 <= seconds < 36 * 3600
    assert 0 <= device_seconds(found, [(last, last)])["cpu"] < 36 * 3600


def test_names_where_python_reads_ascii(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under PYTHONUTF8=0 a name is not called broken: what reads it so is said."""
    monkeypatch.setattr("sys.getfilesystemencoding", lambda: "ascii")
    with pytest.raises(RunDirectoryError, match=r"Python reads names as ascii here .*Set PYTHONUTF8=1\."):
        RunDirectory(tmp_path / "\udcc3\udca4")


def test_a_directory_that_was_lost_is_left_alone(tmp_path: Path) -> None:
    """Once another run has the directory nothing is written, renamed or removed: no result, no last line, no undoing."""
    lost = pytest.raises(RunTakenOverError, match="lost it and ends without writing anything more")
    with lost as caught, RunDirectory(tmp_path / "run") as out:
        out.publish("seed: 1\n")
        (tmp_path / "run" / "hf_format" / "samples_8").mkdir(parents=True)
        (tmp_path / "run" / ".forge-owner-1").unlink()
        before = {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()}
        with pytest.raises(RunTakenOverError):
            remove_at_once(tmp_path / "run" / "hf_format" / "samples_8")
        forge_dist.write_text_atomically(out.path / "result.json", "{}")
    assert caught.value.exit_status == 1
    assert {file: file.read_bytes() for file in (tmp_path / "run").rglob("*") if file.is_file()} == before
    assert (tmp_path / "run" / "hf_format" / "samples_8").is_dir()


def test_a_preparation_that_was_lost_is_left_alone(tmp_path: Path) -> None:
    """What lies in the hidden folder belongs to the other run by then."""
    with pytest.raises(RunTakenOverError), RunDirectory(tmp_path / "run") as out:
        (out.root / "data").mkdir()
        (tmp_path / "run" / ".forge-owner-1").unlink()
        out.publish("")
    assert (tmp_path / "run" / ".forge-preparing" / "data").is_dir()


def test_half_a_copy_is_removed_without_the_lock(tmp_path: Path) -> None:
    """What a kill left of a run that was fetched is removed, and the record of the owner is not part of it."""
    (tmp_path / ".forge-restoring").mkdir()
    (tmp_path / "metrics.jsonl").touch()
    with RunDirectory(tmp_path) as out:
        out.publish("")
        forge_dist.write_text_atomically(out.path / "result.json", "{}")
    assert (tmp_path / "result.json").exists()


def test_a_log_controls_no_terminal(tmp_path: Path) -> None:
    """What a line quotes is escaped in log.txt, which people read with cat."""
    with RunDirectory(tmp_path / "run") as out:
        out.publish("")
        out.log("model\x1b]0;title\x07 \u202e\nsecond")
    written = [line.split("  ", 1)[1] for line in (tmp_path / "run" / "log.txt").read_text().splitlines()]
    assert written == ["model\\x1b]0;title\\x07 \\u202e", "second"]


def published(path: Path) -> None:
    """Make a run with two lines of metrics and two exports."""
    with RunDirectory(path) as out:
        (out.root / "plan").mkdir()
        (out.root / "plan" / "plan.npz").write_bytes(b"old")
        out.log("first start")
        out.publish("seed: 1\n")
        out.metrics({"step": 1})
        out.metrics({"step": 2})
        for samples in (4, 8):
            (out.path / "hf_format" / f"samples_{samples}").mkdir(parents=True)


def test_a_run_goes_on_in_its_directory(tmp_path: Path) -> None:
    """The log is appended to, plan and config.yaml are replaced, half-written files of a killed run are removed."""
    published(tmp_path)
    (tmp_path / "hf_format" / ".samples_9.1-aa.tmp").mkdir()
    with RunDirectory(tmp_path) as out:
        assert out.resuming
        (out.root / "plan").mkdir()
        (out.root / "plan" / "plan.npz").write_bytes(b"new")
        out.log("second start")
        out.publish("seed: 2\n")
        out.metrics({"step": 3})
    assert (tmp_path / "plan" / "plan.npz").read_bytes() == b"new"
    assert (tmp_path / "config.yaml").read_text() == "seed: 2\n"
    assert [line.split("  ")[1] for line in (tmp_path / "log.txt").read_text().splitlines()] == ["first start", "second start"]
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]
    assert sorted(entry.name for entry in (tmp_path / "hf_format").iterdir()) == ["samples_4", "samples_8"]


def test_metrics_are_durable_before_a_state_records_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`settle` returns a length that a machine which loses its power will find: the file itself was synced at it."""
    published(tmp_path)
    synced: dict[int, int] = {}
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        synced[os.fstat(descriptor).st_ino] = os.fstat(descriptor).st_size

    monkeypatch.setattr(os, "fsync", noted)
    with RunDirectory(tmp_path) as out:
        out.publish("seed: 1\n")
        out.metrics({"step": 3})
        synced.clear()
        length = out.settle()
    file = tmp_path / "metrics.jsonl"
    assert [line["step"] for line in lines(file)] == [1, 2, 3]
    assert length == file.stat().st_size == synced[file.stat().st_ino]


def test_a_refused_start_leaves_the_run_alone(tmp_path: Path) -> None:
    """An error before `publish` changes not a byte of the run in the directory, its log included."""
    published(tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(SettingsError), RunDirectory(tmp_path) as out:
        out.log("second start")
        raise SettingsError("no")
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_rewinding(tmp_path: Path) -> None:
    """Lines after a position and exports of more samples are removed; a file that was cut is refused."""
    published(tmp_path)
    with RunDirectory(tmp_path) as out:
        (out.root / "plan").mkdir()
        (out.root / "plan" / "plan.npz").touch()
        out.publish("")
        first, _ = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
        assert out.rewind(len(first), 4) == ["samples_8"]
        out.metrics({"step": 2, "again": True})
        with pytest.raises(RunDirectoryError, match=r"metrics\.jsonl"):
            out.check(1000)
    one, two = lines(tmp_path / "metrics.jsonl")
    assert (one["step"], two["step"], two["again"]) == (1, 2, True)


def test_figures_that_are_not_finite_stay_json(tmp_path: Path) -> None:
    """NaN is not valid JSON: it becomes null."""
    with RunDirectory(tmp_path) as out:
        out.publish("")
        out.metrics({"loss": float("nan"), "lr": 0.1})
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert (line["loss"], line["lr"]) == (None, 0.1)


def test_every_line_says_when(tmp_path: Path) -> None:
    """Lines of metrics.jsonl and events.jsonl have the time as RFC 3339 in UTC."""
    with RunDirectory(tmp_path) as out:
        before = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
        out.publish("")
        out.metrics({"step": 1})
        out.log("a state is gone", event="resumed")
    for name in ("metrics.jsonl", "events.jsonl"):
        (line,) = lines(tmp_path / name)
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
        assert before <= datetime.datetime.fromisoformat(line["time"]) <= datetime.datetime.now(datetime.UTC)


class Interrupted(SettingsError):
    """An ending with the status of a saved state."""

    exit_status = 75


@pytest.mark.parametrize(
    ("error", "event"),
    [(ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted"), (Interrupted("stopped"), "preempted")],
)
def test_events(tmp_path: Path, error: BaseException, event: str) -> None:
    """An event is a line of the log with its kind, the step and what is known of it; a warning and the ending are events."""
    with pytest.raises(type(error)), RunDirectory(tmp_path) as out:
        out.publish("")
        out.began = True
        out.log("no event")
        out.metrics({"step": 3})
        out.log("WARNING: the disk is nearly full")
        out.log("exported", event="exported", reloaded=float("nan"))
        raise error
    warned, exported, ended = lines(tmp_path / "events.jsonl")
    assert (warned["event"], warned["step"], warned["text"]) == ("warning", 3, "WARNING: the disk is nearly full")
    assert (exported["event"], exported["reloaded"]) == ("exported", None)
    assert (ended["event"], ended["step"]) == (event, 3)
    assert ended["text"] in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("signal", [(), ("SIGTERM",)])
def test_an_interruption_says_what_the_same_command_does(signal: tuple[str, ...], tmp_path: Path) -> None:
    """In the log and in what is raised: it begins anew, or goes on from the last state."""
    state = tmp_path / "state" / "full_state" / "step_8"
    said = {
        "none": "nothing was saved to go on from, and the same command begins anew.",
        "state": f"the same command goes on from {state}.",
    }
    for name, text in said.items():
        with pytest.raises(KeyboardInterrupt) as caught, RunDirectory(tmp_path / name) as out:
            out.publish("")
            out.began = True
            if name == "state":
                state.mkdir(parents=True)
                (state.parent / "latest").write_text("step_8\n")
            raise KeyboardInterrupt(*signal)
        whole = ": ".join([*signal, text])
        assert str(caught.value) == whole
        assert f"interrupted: {whole}" in (tmp_path / name / "log.txt").read_text()


def test_events_of_all_starts(tmp_path: Path) -> None:
    """A run that goes on appends to its events; a start that is refused adds none."""
    published(tmp_path)
    for _ in range(2):
        with RunDirectory(tmp_path) as out:
            (out.root / "plan").mkdir()
            (out.root / "plan" / "plan.npz").touch()
            out.log("again", event="resumed")
            out.publish("")
    with pytest.raises(SettingsError), RunDirectory(tmp_path) as out:
        out.log("again", event="resumed")
        raise SettingsError("no")
    assert [line["event"] for line in lines(tmp_path / "events.jsonl")] == ["resumed", "resumed"]


def test_nothing_that_was_trained_is_lost_for_want_of_a_state(tmp_path: Path) -> None:
    """A result without a full state is refused; exports alone stay, until the steps that led to them are made again."""
    published(tmp_path)
    with RunDirectory(tmp_path) as out:
        (out.root / "plan").mkdir()
        (out.root / "plan" / "plan.npz").touch()
        out.check(None)
        out.publish("")
        assert out.rewind(0, None) == []
    assert not (tmp_path / "metrics.jsonl").read_bytes()
    assert sorted(entry.name for entry in (tmp_path / "hf_format").iterdir()) == ["samples_4", "samples_8"]
    (tmp_path / "result.json").write_text("{}")
    with RunDirectory(tmp_path) as out, pytest.raises(RunDirectoryError, match="holds a finished run and no full state"):
        out.check(None)


def test_killed_while_publishing(tmp_path: Path) -> None:
    """What was moved out of the hidden folder before the kill is made again; only those names are touched."""
    (tmp_path / ".forge-preparing" / "plan").mkdir(parents=True)
    (tmp_path / "data").mkdir()
    (tmp_path / "log.txt").touch()
    with RunDirectory(tmp_path) as out:
        assert not out.resuming
        assert sorted(entry.name for entry in tmp_path.iterdir()) == [".forge-owner-1", ".forge-preparing"]
    (tmp_path / ".forge-preparing").mkdir()
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunDirectoryError, match=r"thesis\.tex"), RunDirectory(tmp_path):
        pass


@pytest.mark.parametrize(("text", "steps"), [(b'{"loss": 1.0}\n\xff\n', True), (b"\xff\xfe\n", False)])
def test_a_record_that_is_not_text_is_looked_through(text: bytes, steps: bool, tmp_path: Path) -> None:
    """Whether a run has steps is asked before anything is known of its files."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("seed: 1\n")
    (run / "metrics.jsonl").write_bytes(text)
    with RunDirectory(run) as out:
        assert out.resuming
        assert out.has_steps is steps


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("result.json", "directory"),
        ("metrics.jsonl", "directory"),
        ("log.txt", "directory"),
        ("data", "file"),
        ("plan", "file"),
        ("plan/plan.npz", "directory"),
        ("hf_format/hashes.json", "directory"),
        ("hf_format/best.json", "directory"),
        ("hf_format", "file"),
        ("full_state", "link to nothing"),
        ("events.jsonl", "link to nothing"),
    ],
)
def test_what_is_of_another_kind_is_named(name: str, what: str, tmp_path: Path) -> None:
    """A directory in the place of a run's file, a file in that of a folder: one message before any work, nothing changed."""
    run = tmp_path / "run"
    with RunDirectory(run) as out:
        out.publish("seed: 1\n")
    entry = run / name
    entry.unlink(missing_ok=True)
    if what == "directory":
        entry.mkdir(parents=True)
    elif what == "file":
        entry.write_text("mine")
    else:
        entry.symlink_to(tmp_path / "nothing")
    before = sorted(each.relative_to(run) for each in run.rglob("*"))
    with (
        pytest.raises(RunDirectoryError, match=rf"run/{name}: is a {what}, and a run has a (file|directory)") as caught,
        RunDirectory(run),
    ):
        pass
    assert caught.value.exit_status == 2
    assert sorted(each.relative_to(run) for each in run.rglob("*")) == before


def test_undoing_that_fails_does_not_hide_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a file system that became read-only what was made stays, and the error is the first one."""
    run = tmp_path / "run"

    def readonly(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with pytest.raises(SettingsError, match="the reason"), RunDirectory(run) as out:
        (out.root / "run.json").touch()
        out.publish("seed: 1\n")
        monkeypatch.setattr(Path, "unlink", readonly)
        raise SettingsError("the reason")
