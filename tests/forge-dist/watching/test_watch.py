"""Beats of ranks → the rank that stands still; a clock made by hand, so that no test waits for a stall."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from forge_dist.watching import _beats, _watch
from forge_dist.watching._beats import Beats
from forge_dist.watching._board import Board
from forge_dist.watching._guard import keep_stacks
from forge_dist.watching._stacks import Place, stacks_of, traces_of
from forge_dist.watching._watch import AwakeClock, Stall, Watch, Watched


def test_time_asleep_does_not_count(monkeypatch):
    """The clock of silence runs while this process runs: a gap of an hour between two looks counts as about a second."""
    now = 100.0
    monkeypatch.setattr(_watch.time, "monotonic", lambda: now)
    clock = AwakeClock()
    now += 0.5
    assert clock.tick() == 0.5
    now += 3600
    assert clock.tick() <= 1.5


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run of several ranks whose time, process states and traffic the test sets."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(_watch.time, "monotonic", lambda: clock.now)
    states, traffic, places = {}, {}, {}
    monkeypatch.setattr(_watch, "_state", lambda pid: states.get(pid, "S"))
    monkeypatch.setattr(_watch, "_traffic", lambda pid: traffic.get(pid, 0))
    monkeypatch.setattr(_watch, "request", lambda _: None)
    monkeypatch.setattr(_watch, "place_in", lambda file: places.get(int(file.name.partition(".")[0])))

    def make(world_size, timeout=None, *, alone=True):
        ranks = [Beats(Board(tmp_path / str(rank), make=True), timeout) for rank in range(world_size)]
        watch = Watch(alone=lambda: alone, named=world_size > 1)
        watched = [Watched(rank, tmp_path / str(rank), 100 + rank) for rank in range(world_size)]

        def passes(seconds, *moving):
            """Let time pass; the ranks of `moving` beat. What the watch said, without repetitions; a stall ends it."""
            said, end = [], clock.now + seconds
            while clock.now < end:
                clock.now += 0.5
                for rank in moving:
                    ranks[rank].beat()
                found = watch.look(watched)
                if found is not None:
                    said.append(found)
                if isinstance(found, Stall):
                    break
            return said

        return SimpleNamespace(ranks=ranks, passes=passes, states=states, traffic=traffic, places=places, clock=clock)

    return make


def steps(it, seconds, number=3):
    """Let every rank make steps, each in so many seconds."""
    for rank in it.ranks:
        rank.beat(0)
    for step in range(1, number + 1):
        assert it.passes(seconds) == []
        for rank in it.ranks:
            rank.beat(step)


def test_a_rank_that_stands_still_is_named(run):
    """Nobody moves: a word first, then a stall that names the one that does not wait, its step, its place and the others."""
    it = run(3, timeout=60.0)
    steps(it, 2)
    it.places.update({0: Place("torch/distributed/x.py:1 in all_gather", True), 1: Place("mine.py:7 in forward", False)})
    it.places[2] = it.places[0]
    *words, stall = it.passes(100)
    assert words[0] == "rank 0 has not moved since step 3 (30 s); after 60 s the run is ended (stall_timeout)"
    assert len(words) == 3
    assert (stall.rank, stall.pid) == (1, 101)
    assert stall.text == ("rank 1 has not moved since step 3 for 60 s: it is at mine.py:7 in forward; ranks 0, 2 wait for it")


def test_the_rank_that_is_behind_is_spoken_of(run):
    """Of ranks that were last seen to move at once, the word is of the one with fewer steps."""
    it = run(3, timeout=60.0)
    steps(it, 2)
    for rank in (0, 2):
        it.ranks[rank].beat(4)
    assert it.passes(40)[0].startswith("rank 1 has not moved since step 3 (30 s)")


def test_ranks_that_wait_for_one_that_moves_are_left_alone(run):
    """One rank exports for hours and beats: the others' silence is a wait."""
    it = run(2, timeout=20.0)
    steps(it, 1)
    assert it.passes(500, 0) == []
    assert isinstance(it.passes(60)[-1], Stall)


def test_other_nodes_that_move_are_heard_of(run):
    """What moves elsewhere is progress here, where ranks wait for it."""
    it = run(1, timeout=20.0)
    steps(it, 1)
    for count in range(40):
        it.ranks[0].elsewhere(count + 1)
        assert it.passes(5) == []
    assert isinstance(it.passes(60)[-1], Stall)


def test_a_stopped_process_is_named_whatever_it_was_doing(run):
    """SIGSTOP of a rank that loads or exports ends the run after stall_timeout, though the phase itself may take longer."""
    it = run(2, timeout=20.0)
    for rank in it.ranks:
        rank.doing("loading the model")
    it.states[101] = "T"
    *words, stall = it.passes(60, 0)
    assert (words, stall.rank) == ([], 1)
    assert stall.text.startswith("rank 1 has not moved in loading the model for 20 s: its process is stopped (SIGSTOP)")


def test_a_process_that_goes_on_after_a_stop_is_left_alone(run):
    """Stopped for less than the timeout: nothing happens."""
    it = run(1, timeout=20.0)
    it.ranks[0].doing("exporting")
    for _ in range(5):
        it.states[100] = "T"
        assert it.passes(15) == []
        it.states[100] = "R"
        assert it.passes(1) == []


def test_a_long_phase_has_a_bound_of_its_own(run):
    """Four minutes of native code in an export are no stall with a timeout of seconds; half an hour without a sign is."""
    it = run(1, timeout=5.0)
    steps(it, 1)
    it.ranks[0].doing("exporting samples_8")
    assert it.passes(240) == []
    *_, stall = it.passes(1700)
    assert stall.text.startswith("the run has not moved in exporting samples_8 after step 3 for 1800 s")


def test_reading_and_writing_is_progress_in_a_long_phase_alone(run):
    """A download that cannot beat writes; a step that hangs is not saved by a thread that writes."""
    it = run(1, timeout=5.0)
    it.ranks[0].doing("loading org/model")
    for _ in range(5):
        it.traffic[100] = it.traffic.get(100, 0) + (2 << 20)
        assert not any(isinstance(found, Stall) for found in it.passes(1700))
    steps(it, 1)
    it.traffic[100] += 1 << 30
    assert isinstance(it.passes(10)[-1], Stall)


def test_the_default_follows_the_slowest_step(run):
    """At least ten minutes; ten times the slowest step where steps are slow, the first one and exports left out."""
    it = run(1)
    it.ranks[0].beat(0)
    it.passes(500)
    it.ranks[0].beat(1)
    for step in range(2, 5):
        assert not any(isinstance(found, Stall) for found in it.passes(100))
        it.ranks[0].beat(step)
    it.ranks[0].doing("exporting")
    it.passes(900)
    it.ranks[0].beat(5)
    assert it.ranks[0]._step_bound() == pytest.approx(1000.0)
    assert not any(isinstance(found, Stall) for found in it.passes(990))
    assert isinstance(it.passes(20)[-1], Stall)


def test_a_first_step_may_compile(run):
    """The first step after a start has ten minutes, also where the timeout is shorter."""
    it = run(1, timeout=5.0)
    it.ranks[0].beat(7)
    assert not any(isinstance(found, Stall) for found in it.passes(590))
    stall = it.passes(20)[-1]
    assert stall.text.startswith("the run has not moved since step 7")


def test_ranks_that_all_wait_leave_the_word_to_another_node(run):
    """On several nodes the cause may be elsewhere: its node has a quarter of a minute to name it."""
    it = run(2, timeout=20.0, alone=False)
    steps(it, 1)
    it.places.update({rank: Place("torch/distributed/x.py:1 in all_reduce", True) for rank in range(2)})
    assert not any(isinstance(found, Stall) for found in it.passes(33))
    stall = it.passes(5)[-1]
    assert "it waits for other ranks" in stall.text


def test_one_that_ended_is_not_watched(run):
    """A rank that left the run does not hide one that hangs, and is not blamed for it."""
    it = run(2, timeout=20.0)
    steps(it, 1)
    it.ranks[0].close()
    stall = it.passes(30)[-1]
    assert stall.rank == 1


SLEEPER = """
import ctypes, sys, time
from pathlib import Path
from forge_dist.watching._beats import open_beats

def hang_in_native_code():
    print("ready", flush=True)
    # PyDLL keeps Python's lock: no thread of this process runs meanwhile.
    lock = ctypes.create_string_buffer(64)
    while True:
        ctypes.PyDLL(None).pthread_mutex_lock(lock)

open_beats(Path(sys.argv[1]), 20.0)
hang_in_native_code()
"""


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [False, True])
def test_stacks_come_out_of_native_code(tmp_path, stopped):
    """A process that holds Python's lock in native code writes its stack on the signal; so does one that is stopped."""
    board = tmp_path / "beats"
    process = subprocess.Popen([sys.executable, "-c", SLEEPER, str(board)], stdout=subprocess.PIPE)
    try:
        process.stdout.readline()
        # It says that it is ready a moment before.
        time.sleep(0.5)
        if stopped:
            os.kill(process.pid, signal.SIGSTOP)
            end = time.monotonic() + 120
            while _watch._state(process.pid) != "T" and time.monotonic() < end:
                time.sleep(0.01)
            assert _watch._state(process.pid) == "T"
        _watch.request([(process.pid, board)])
        place = _watch.place_in(stacks_of(board))
        assert place == Place("<string>:11 in hang_in_native_code", False)
    finally:
        process.kill()
        process.communicate()


def test_beats_of_a_process_without_a_watch_are_free():
    """`beat` and `doing` of a process that nobody watches do nothing."""
    assert _beats.current_beats() is None
    _beats.beat(3)
    _beats.doing("exporting")


def test_recorders_of_collectives_are_asked(tmp_path):
    """A pipe of torch's flight recorder beside the beats is written to; one that nobody reads does not hold anybody up."""
    board = tmp_path / "beats"
    prefix = traces_of(board)
    pipes = [prefix.with_name(f"{prefix.name}{rank}.pipe") for rank in range(2)]
    for pipe in pipes:
        os.mkfifo(pipe)
    reader = os.open(pipes[1], os.O_RDONLY | os.O_NONBLOCK)
    stacks_of(board).write_text("stacks")
    prefix.with_name(f"{prefix.name}1").write_text("collectives")
    _watch.request([(2**22 + 1, board)])
    assert os.read(reader, 10) == b"1\n"
    os.close(reader)
    said = keep_stacks([(1, board)], tmp_path / "logs")
    assert said == f"The stacks of its threads: {tmp_path / 'logs' / 'stacks_rank_1.txt'}"
    assert sorted(file.name for file in (tmp_path / "logs").iterdir()) == ["collectives_rank_1", "stacks_rank_1.txt"]
