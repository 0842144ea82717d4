"""First use of a library in a process of one command, without Python's search for garbage."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_of_one_command: list[bool] = []
"""Whether this process runs one command: what imports make stays to its end."""


def process_of_one_command() -> None:
    """Keep what libraries make at their first use out of every search for garbage.

    Not for a process that is somebody else's: what lies in a circle then would never be freed.
    """
    _of_one_command[:] = [True]


@contextmanager
def uncollected() -> Iterator[None]:
    """Leave garbage alone inside the block, which imports libraries, if the process is ours.

    transformers, and torch that it takes along, make half a million objects, at which Python would look again and again: a
    quarter of the processor time of a command with few rows.
    """
    if not (_of_one_command and gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
