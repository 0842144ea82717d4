"""First use of a library without Python's search for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_of_one_command: list[bool] = []
"""Whether this process runs one command of forge: what imports make stays to its end."""


def process_of_one_command() -> None:
    """Keep what libraries make at their first use out of every later search for garbage.

    Not for a process that is somebody else's: what lies in a circle then, such as a model of theirs, would never be freed.
    """
    _of_one_command[:] = [True]


def is_process_of_one_command() -> bool:
    """Return whether `process_of_one_command` was called."""
    return bool(_of_one_command)


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave garbage alone inside the block, which imports libraries.

    What imports make stays. Python looks through it 1,000 times while torch and transformers are imported, and at all half a
    million objects again in each full collection, a third of a second: together a sixth of a small run's time.
    """
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            if _of_one_command:
                gc.freeze()
            gc.enable()
