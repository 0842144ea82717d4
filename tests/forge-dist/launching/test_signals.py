"""Signals held back, and given to whom they were for."""

import signal
import threading

import pytest

from forge_dist.launching._signals import deferred_signals


class Asked(Exception):
    pass


@pytest.fixture
def handle():
    """`handle(number, handler)`: as signal.signal, undone afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield signal.signal
    for number, handler in before.items():
        signal.signal(number, handler)


def ask(*_):
    raise Asked


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_waits_for_the_end_of_the_block(handle, number):
    """Nothing is raised inside; behind it the handler of before raises, once put back."""
    handle(number, ask)
    went_on = False
    with pytest.raises(Asked), deferred_signals() as came:
        signal.raise_signal(number)
        went_on = True
    assert went_on
    assert came == [number]
    assert signal.getsignal(number) is ask


def test_a_handler_that_raises_nothing_is_called_and_the_signal_listed(handle):
    """The list says that a signal came, whatever its handler made of it."""
    seen = []
    handle(signal.SIGTERM, lambda number, _: seen.append(number))
    with deferred_signals() as came:
        signal.raise_signal(signal.SIGTERM)
        assert seen == []
    assert (came, seen) == ([signal.SIGTERM], [signal.SIGTERM])


def test_an_error_of_the_block_comes_first(handle):
    """What the block raises is what is raised, and the handlers are put back."""
    handle(signal.SIGTERM, ask)
    with pytest.raises(ImportError), deferred_signals():
        signal.raise_signal(signal.SIGTERM)
        raise ImportError
    assert signal.getsignal(signal.SIGTERM) is ask


def test_what_was_ignored_stays_ignored(handle):
    """A job that a shell put in the background does not hear of Ctrl-C."""
    handle(signal.SIGINT, signal.SIG_IGN)
    with deferred_signals() as came:
        signal.raise_signal(signal.SIGINT)
    assert came == []


def test_in_another_thread_nothing_changes():
    """Python gives signals to its main thread alone."""
    before, inside = signal.getsignal(signal.SIGTERM), []

    def hold():
        with deferred_signals():
            inside.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert inside == [before]
