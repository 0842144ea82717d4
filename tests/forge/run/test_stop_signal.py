"""Handler of SIGTERM and SIGINT: a line at once, without a lock, and the guard is told."""

import os
import signal
import sys
import time

import pytest

import forge_dist
from forge.run._stop_signal import StopSignal, lost_interrupts


class Busy:
    """A stderr that is being written to."""

    def write(self, _text):
        """Refuse, as a `print` within a `print` of the same thread is refused."""
        raise RuntimeError("reentrant call")

    flush = write


def test_it_says_at_once_what_becomes_of_the_run(capfd, monkeypatch):
    """One line, also in the middle of a `print` of the same thread; the guard hears that it was said."""
    answered = []
    monkeypatch.setattr(forge_dist, "signal_answered", lambda: answered.append(True), raising=False)
    with monkeypatch.context() as patched, StopSignal() as stop:
        patched.setattr(sys, "stderr", Busy())
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == "SIGINT"
    assert capfd.readouterr().err == (
        "forge: SIGINT: this step is finished and its state saved, then the run ends; a second signal ends it at once.\n"
    )
    assert answered == [True]


def test_a_closed_terminal_stops_a_run_once(capfd):
    """SIGHUP comes twice, from the shell and from the kernel: it asks for the end, and never for one at once."""
    before = signal.getsignal(signal.SIGHUP)
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGHUP)
        assert stop.received == "SIGHUP"
        os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGTERM) != stop._receive
    assert signal.getsignal(signal.SIGHUP) == before
    assert capfd.readouterr().err.count("SIGHUP") == 1


def test_sigusr1_stops_a_run_unless_it_means_something_else(capfd):
    """Slurm's --signal=USR1 saves the state, and the time limit's SIGTERM is a second one; a program's own handler stays."""
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == "SIGUSR1"
    assert capfd.readouterr().err.count("SIGUSR1: this step is finished") == 1
    got = []
    before = signal.signal(signal.SIGUSR1, lambda *_: got.append(1))
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (stop.received, got) == (None, [1])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert before == signal.SIG_DFL


@pytest.mark.usefixtures("python_handler")
def test_a_signal_to_a_rank_and_to_its_launcher_is_one(monkeypatch):
    """Slurm and systemd signal the ranks too, to which the launcher forwards its own; a later one is a second one."""
    monkeypatch.setenv("FORGE_LAUNCHER_PID", str(os.getppid()))
    with pytest.raises(KeyboardInterrupt), StopSignal() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == "SIGINT"
        later = time.monotonic() + 10
        monkeypatch.setattr("time.monotonic", lambda: later)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one ended nothing")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_nohup_is_heeded():
    """Where SIGHUP is ignored it stays ignored."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.received is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_settled_end_takes_no_more_signals():
    """Once the state is saved; outside of the block everything is as before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)}
    with StopSignal() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        stop.settle()
        for number in before:
            os.kill(os.getpid(), number)
        assert stop.received == "SIGINT"
    assert {number: signal.getsignal(number) for number in before} == before


class Deleted:
    """An object whose deletion a signal meets, as one of numba's compiler."""

    def __del__(self):
        """Receive it where Python drops what its handler raises."""
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def python_handler():
    """The handler that a command has, which raises: pytest's own process may have another."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("python_handler")
def test_ctrl_c_during_a_deletion_is_not_lost(capsys):
    """It ends the run before its first step; a former run's is forgotten."""
    with lost_interrupts():
        Deleted()
        with pytest.raises(KeyboardInterrupt), StopSignal():
            pytest.fail("the run began")
    assert not capsys.readouterr().err
    with lost_interrupts(), StopSignal() as stop:
        assert stop.received is None
