"""One process that tokenises: a job, then tasks, over a socket, until the parent closes it.

It opens the socket and writes its address to stdout. The parent reads that line, or the end of a process that could not start,
and so never waits for one that will not come.
"""

import contextlib
import gc
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Generator, Iterator
from multiprocessing.connection import Connection, Listener
from typing import Any, NamedTuple, TypeVar

from forge_data.preparing._job import Processor

T = TypeVar("T")

_FULL_EVERY = 64
"""Batches after which everything is scanned, so that no cycle that outlived its batch stays for good."""


class Failure(NamedTuple):
    """Sent instead of a batch where this package's code failed."""

    trace: str


def main() -> None:
    """Run a worker: one job, then tasks until the parent closes the connection."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the parent ends its workers
    key = sys.stdin.readline().strip()
    with Listener(authkey=key.encode()) as listener:
        sys.stdout.write(f"{listener.address}\n")
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's function prints must not be read as an answer
        connection = listener.accept()
    with contextlib.suppress(EOFError, ConnectionError), connection:
        process = Processor(connection.recv())
        for number, task in collect_per_batch(_received(connection)):
            try:
                answer: Any = process(task)
            except Exception:  # noqa: BLE001 - a defect: reported with its traceback by the parent
                answer = Failure(traceback.format_exc())
            connection.send((number, answer))


def _received(connection: Connection) -> Iterator[tuple[int, Any]]:
    """Yield what arrives; it is read by a thread while the last task is still in work.

    Two sides that both wait until the other reads would wait for ever.
    """
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                tasks.put(connection.recv())
        except Exception as error:  # noqa: BLE001 - raised in the main thread
            tasks.put(error)

    threading.Thread(target=receive, daemon=True).start()
    while not isinstance(task := tasks.get(), Exception):
        yield task
    raise task


def collect_per_batch(batches: Iterator[T]) -> Generator[T, None, None]:
    """Yield batches; after each, collect cycles among new objects, now and then among all.

    Left to itself, Python's collector scans everything that the process holds, every library included, again and again; that
    took a fifth of the time and found nothing, since what a batch leaves behind is freed without it. Where the collector is off
    already, nothing is collected and nothing turned on.
    """
    if not gc.isenabled():
        yield from batches
        return
    gc.disable()
    try:
        for number, batch in enumerate(batches, start=1):
            yield batch
            # Only the newest generation: otherwise what is in use for a moment (the rows of the following batch) would count as
            # old,
            # and once a quarter of everything seems newly old, Python scans everything: 0.25 s in a process that holds torch.
            gc.collect(0 if number % _FULL_EVERY else 2)
    finally:
        gc.enable()
