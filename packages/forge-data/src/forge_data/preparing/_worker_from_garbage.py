"""When Python's collector of reference cycles runs while rows are prepared: once a batch, not whenever enough was allocated.

Left to itself it looks through all that the process holds, every library included, again and again; that took a fifth of the time,
and found nothing, for what a batch leaves behind is freed without it.
"""

import gc
from collections.abc import Generator, Iterator
from typing import TypeVar

T = TypeVar("T")

_ALL_EVERY = 64
"""Batches after which everything is looked through, so that no cycle that outlived its own batch stays for good."""


def collected(batches: Iterator[T]) -> Generator[T, None, None]:
    """The batches; cycles are looked for after each, in what is new, and now and then in everything.

    Whoever had the collector off has it off: nothing is collected then, and nothing turned on.
    """
    if not gc.isenabled():
        yield from batches
        return
    gc.disable()
    try:
        for number, batch in enumerate(batches, start=1):
            yield batch
            # The newest generation alone: else what is in use only just now (the rows of the following batch) would count as old, and
            # once a quarter of all seems to be newly old, Python looks through everything: 0.25 s in a process that holds torch.
            gc.collect(0 if number % _ALL_EVERY else 2)
    finally:
        gc.enable()
