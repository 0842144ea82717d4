"""One process that tokenises: a job, then tasks, over a socket, until the other side is gone.

It opens the socket and writes its address to stdout. Whoever started it reads the line, or the end of a process that could not
start, and so never waits for one that will not come.
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

from forge_data.preparing._job import Work

T = TypeVar("T")

_ALL_EVERY = 64
"""Batches after which everything is looked through, so that no cycle that outlived its own batch stays for good."""


class Failure(NamedTuple):
    """What is sent instead of a batch where our own code failed."""

    trace: str


def main() -> None:
    """A worker: one job, then tasks until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; who started us takes care of us
    key = sys.stdin.readline().strip()
    with Listener(authkey=key.encode()) as listener:
        sys.stdout.write(f"{listener.address}\n")
        sys.stdout.flush()
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a user's function prints is no answer of ours
        connection = listener.accept()
    with contextlib.suppress(EOFError, ConnectionError), connection:
        work = Work(connection.recv())
        for number, task in collected(_received(connection)):
            try:
                answer: Any = work(task)
            except Exception:  # noqa: BLE001 - a fault of ours: told with its trace in the process that people watch
                answer = Failure(traceback.format_exc())
            connection.send((number, answer))


def _received(connection: Connection) -> Iterator[tuple[int, Any]]:
    """What comes, taken in while the last task is still worked on: two sides that both wait to be read would wait for ever."""
    tasks: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def receive() -> None:
        try:
            while True:
                tasks.put(connection.recv())
        except Exception as error:  # noqa: BLE001 - it belongs to the thread that works
            tasks.put(error)

    threading.Thread(target=receive, daemon=True).start()
    while not isinstance(task := tasks.get(), Exception):
        yield task
    raise task


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
