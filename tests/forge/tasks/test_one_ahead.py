"""The next step's batches are made in a thread while the device computes this one's."""

import threading

import pytest

from forge.tasks._offline import one_ahead


def test_one_is_made_ahead():
    """While an item is used, the next one is made elsewhere, and none after it; the order is that of the iterator."""
    made, ready = [], threading.Semaphore(0)

    def items():
        for number in range(4):
            made.append((number, threading.current_thread().name))
            ready.release()
            yield [number]

    used = one_ahead(items())
    for number in range(4):
        assert next(used) == [number]
        for _ in range(2 if number == 0 else number < 3):
            ready.acquire(timeout=30)
        assert [each for each, _ in made] == list(range(min(number + 2, 4)))
    assert next(used, None) is None
    assert {name for _, name in made} == {"next-step_0"}


def test_an_error_comes_in_its_turn():
    """What making an item raises is raised where that item was asked for, after those before it."""

    def items():
        yield [0]
        raise ValueError("a torn row")

    used = one_ahead(items())
    assert next(used) == [0]
    with pytest.raises(ValueError, match="a torn row"):
        next(used)


def test_an_end_waits_for_nobody():
    """A run that stops early leaves no thread behind."""
    used = one_ahead(iter([[number] for number in range(9)]))
    assert next(used) == [0]
    used.close()
    assert not any(thread.name.startswith("next-step") for thread in threading.enumerate())
