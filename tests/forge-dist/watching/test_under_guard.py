"""A process with a guard beside it: what it is told, what it is spared."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time

import pytest

from forge_dist import StallError
from forge_dist.watching import _under_guard
from forge_dist.watching._beats import beat, current_beats
from forge_dist.watching._under_guard import signal_answered, under_guard

pytestmark = pytest.mark.slow


def nothing(_error):
    """What is called before a process is left: not here."""


def test_the_guard_lives_as_long_as_the_block(tmp_path, monkeypatch):
    """It is started, and is gone afterwards; signals are told of within the block only."""
    started = []
    original = _under_guard._start
    monkeypatch.setattr(_under_guard, "_start", lambda *given: started.append(original(*given)) or started[-1])
    with under_guard(0, 1, tmp_path / "logs", 60.0, nothing):
        assert current_beats() is not None
        assert started[0].poll() is None
        told = signal.set_wakeup_fd(-1)
        assert told == started[0].stdin.fileno()
        signal.set_wakeup_fd(told)
        with subprocess.Popen([sys.executable, "-c", "import signal; print(signal.set_wakeup_fd(-1))"], stdout=-1) as child:
            assert child.communicate()[0].strip() == b"-1"
        pid = os.fork()
        if pid == 0:
            os._exit(int(signal.set_wakeup_fd(-1) != -1 or current_beats() is not None))
        assert os.waitpid(pid, 0)[1] == 0
    assert started[0].returncode == 0
    assert signal.set_wakeup_fd(-1) == -1
    assert current_beats() is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("answers", [True, False])
def test_a_signal_is_answered_within_a_second_or_two(tmp_path, capfd, answers):
    """By the guard, where the process does not tell it that it has said something itself."""
    before = signal.signal(signal.SIGINT, lambda *_: signal_answered() if answers else None)
    try:
        with under_guard(0, 1, tmp_path / "logs", 60.0, nothing):
            signal.raise_signal(signal.SIGINT)
            time.sleep(2)
    finally:
        signal.signal(signal.SIGINT, before)
    signal_answered()  # nobody listens any more
    assert capfd.readouterr().err.count("forge: SIGINT: the run ends where it can") == (not answers)


LEAVING = """
import os, pathlib, signal, sys
from forge_dist.watching import _under_guard
with _under_guard.under_guard(0, int(sys.argv[2]), pathlib.Path(sys.argv[1]), 60.0, print):
    if os.fork() == 0:
        os._exit(0)
    os.wait()
    exec(sys.argv[3])
"""


@pytest.mark.parametrize(
    ("how", "ranks", "status", "said"),
    [
        ("os._exit(0)", 1, 0, "forge: process {} ended before its run was over, and said nothing: os._exit()"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 2, -9, "forge: rank 0, process {} ended before its run was over"),
        ("_under_guard.dismiss_guard(); os._exit(1)", 1, 1, ""),
        ("sys.exit(0)", 1, 0, ""),
        ("pass", 1, 0, ""),
    ],
)
def test_who_leaves_without_a_word_is_named(tmp_path, how, ranks, status, said):
    """The process cannot say it, and its status may be 0: its guard does, and of no process that it forked."""
    command = [sys.executable, "-c", LEAVING, str(tmp_path / "logs"), str(ranks), how]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        written = process.communicate(timeout=60)[1]  # until the guard too has ended
    assert process.returncode == status
    assert written.count("forge: ") == bool(said)
    assert said.format(process.pid) in written


def test_a_stall_is_raised_in_the_main_thread(tmp_path, monkeypatch):
    """Standing still in Python: StallError comes out of the block, and the stacks are kept."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    said = r"^the run has not moved since step 2 for \d+ s: it is at .*test_under_guard\.py:\d+ in test_a_stall"
    with pytest.raises(StallError, match=said), under_guard(0, 1, tmp_path / "logs", 2.0, nothing):
        for step in range(3):
            beat(step)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            time.sleep(30)
    assert "test_a_stall_is_raised" in (tmp_path / "logs" / "stacks_rank_0.txt").read_text()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_without_room_nothing_is_watched(tmp_path, monkeypatch):
    """A temporary folder that cannot be made costs the watch, not the run."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with under_guard(0, 1, tmp_path / "logs", 60.0, nothing):
        assert current_beats() is None


def test_somebody_elses_wakeup_is_left_alone(tmp_path):
    """An event loop that has signals written to it keeps them; so does a run in another thread than the main one."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    try:
        with under_guard(0, 1, tmp_path / "logs", 60.0, nothing):
            assert signal.set_wakeup_fd(writer) == writer
        assert signal.set_wakeup_fd(writer) == writer
    finally:
        signal.set_wakeup_fd(-1)
        os.close(reader), os.close(writer)
    seen = []

    def run():
        with under_guard(0, 1, tmp_path / "logs", 60.0, nothing):
            seen.append(current_beats() is not None)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [True]
