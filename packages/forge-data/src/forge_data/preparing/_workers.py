"""Tasks to batches, in the order of the tasks: in this process, or in several that each have a tokenizer of their own.

A worker is a Python of its own that runs `_worker.main`. It is not one of multiprocessing's: those run the caller's script
anew, so that a script without `if __name__ == "__main__"` would prepare its data once more in each of them.
"""

import collections
import contextlib
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, wait
from typing import Any

from forge_data._errors import DataError
from forge_data.preparing._batch import Batch
from forge_data.preparing._job import Job, Rows, Task, Work, read
from forge_data.preparing._worker import Failure, collected
from forge_data.store._partial import meeting_place

_PARALLELISM = "TOKENIZERS_PARALLELISM"
_WAITING = 2
"""Tasks that each worker has in hand: one to do and one to do next."""


def batches(job: Job, tasks: "Iterator[Task | Rows]", num_proc: int | None) -> Generator[Batch, None, None]:
    """What became of each task, in order. Where one is at fault its error is raised when its turn comes.

    Args:
        job: what is to be done.
        tasks: the rows to do it to.
        num_proc: processes of one thread each; None for this one, and all the threads that the tokenizer takes.

    Raises:
        DataError: a worker could not start, or ended before its work was done.
    """
    if num_proc is None:
        with contextlib.closing(_side_by_side(job, tasks)) as done:
            yield from collected(done)
        return
    if num_proc == 1:
        with _one_thread():
            work = Work(job)
            yield from collected(map(work, tasks))
        return
    # A function that has no name to import it by cannot travel; then rows are read here, and tokenised there.
    local = job.preprocess if job.preprocess is not None and ":" not in job.preprocess.name else None
    sent = Job(tokenizer=job.tokenizer, options=job.options, preprocess=None) if local else job
    todo = (read(task, local) if local and isinstance(task, Task) else task for task in tasks)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(meeting_place())
        workers = [_Worker(stack, folder) for _ in range(num_proc)]
        for worker in workers:
            worker.connect(stack, sent)
        yield from _in_order(workers, todo)


def _side_by_side(job: Job, tasks: "Iterator[Task | Rows]") -> Generator[Batch, None, None]:
    """The tokenizer, which is not Python, works in a thread on one task while this one ends the task before and begins the next."""
    thread = ThreadPoolExecutor(1, "forge-data-tokenizer")
    try:
        work = Work(job, thread)
        begun = None
        for task in tasks:
            following = work.begin(task)
            if begun is not None:
                yield work.finish(begun)
            begun = following
        if begun is not None:
            yield work.finish(begun)
    finally:
        thread.shutdown(cancel_futures=True)


def _in_order(workers: "list[_Worker]", tasks: "Iterator[Task | Rows]") -> Iterator[Batch]:
    numbered = enumerate(tasks)
    done: dict[int, Batch] = {}
    following = 0
    # What is done but not yet its turn is bounded, for one slow chunk must not let the others fill the memory.
    window = 2 * _WAITING * len(workers)
    free = collections.deque(worker for _ in range(_WAITING) for worker in workers)
    busy = 0
    more = True
    while True:
        while more and free and busy + len(done) < window:
            task = next(numbered, None)
            if task is None:
                more = False
                break
            free.popleft().send(task)
            busy += 1
        while following in done:
            yield done.pop(following)
            following += 1
        if not busy and not more:
            return
        ready = wait([worker.connection for worker in workers]) if busy else []
        for worker in (worker for worker in workers if worker.connection in ready):
            number, batch = worker.receive()
            done[number] = batch
            free.append(worker)
            busy -= 1


class _Worker:
    """The near end of a worker."""

    connection: Connection

    def __init__(self, stack: contextlib.ExitStack, folder: str) -> None:
        self._key = secrets.token_hex(32)
        # What it makes in its temporary folder, its socket too, goes with ours however it ends.
        environment = os.environ | {_PARALLELISM: "false", "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {sys.path!r}; from forge_data.preparing._worker import main; main()",
        ]
        self._process = subprocess.Popen(  # noqa: S603 - this very Python, with a command of our own
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        stack.callback(self._end)

    def connect(self, stack: contextlib.ExitStack, job: Job) -> None:
        """Wait until it listens, and give it its job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._died():
            self._process.stdin.write(self._key + "\n")
            self._process.stdin.flush()
            address = self._process.stdout.readline().strip()
            if not address:
                raise EOFError
            self.connection = stack.enter_context(Client(address, authkey=self._key.encode()))
        self._put(job)

    def send(self, task: "tuple[int, Task | Rows]") -> None:
        """Give it something to do."""
        self._put(task)

    def receive(self) -> tuple[int, Batch]:
        """Take what it did."""
        with self._died():
            number, batch = self.connection.recv()
        match batch:
            case Failure(trace):
                raise RuntimeError(f"a worker of forge_data.prepare failed:\n{trace}")
            case _:
                return number, batch

    def _put(self, what: Any) -> None:
        with self._died():
            self.connection.send(what)

    @contextlib.contextmanager
    def _died(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
            code = self._process.returncode
            how = (
                f"was ended by signal {-code} ({signal.Signals(-code).name})"
                if code and code < 0
                else f"ended with status {code}"
            )
            why = "; the system ends processes so when memory runs out" if code == -9 else ""
            raise DataError(
                f"a worker process of prepare {how} before its work was done{why}; use fewer with num_proc"
            ) from error

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """One worker is one thread, in this process as in others: `num_proc` alone says how many cores are used."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before
