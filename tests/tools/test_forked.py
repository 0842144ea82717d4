"""A lane's cases in processes of their own: one that hangs is ended, and what one answers is read."""

import multiprocessing
import os
import time

import forked
import pytest


def endless():
    """A process with a group of its own that does not end."""
    os.setpgid(0, 0)
    time.sleep(600)


@pytest.mark.parametrize(("target", "said"), [(endless, "did not end within 1 s"), (int, "ended with exit status 0")])
def test_a_process_that_hangs_is_ended(target, said):
    """The lane waits for no family longer than its limit."""
    process = multiprocessing.get_context("fork").Process(target=target)
    process.start()
    began = time.monotonic()
    assert forked.wait(process, 1) == said
    assert not process.is_alive()
    assert time.monotonic() - began < 60
