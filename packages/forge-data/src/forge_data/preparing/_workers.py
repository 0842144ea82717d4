"""Tasks → batches, in the order of the tasks, made in this process or in several.

A worker is a Python process that runs `_worker.main`. It is not one of multiprocessing's: those run the caller's script anew,
so a script without `if __name__ == "__main__"` would prepare its data once more in each of them.
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

import attrs

from forge_data._errors import DataError
from forge_data.preparing._batch import Batch
from forge_data.preparing._job import Job, Preprocessed, Processor, Task, read
from forge_data.preparing._worker import Failure, collect_per_batch
from forge_data.store._partial import worker_directory

_PARALLELISM = "TOKENIZERS_PARALLELISM"
_TASKS_PER_WORKER = 2
"""Tasks that each worker holds: one in work and one to do next."""


def batches(job: Job, tasks: "Iterator[Task | Preprocessed]", num_proc: int | None) -> Generator[Batch, None, None]:
    """Make the batch of each task, in order; the error of a task is raised when its turn comes.

    Args:
        job: what to make batches with.
        tasks: chunks of rows.
        num_proc: processes of one thread each; None for this one, with all threads of the tokenizer.

    Raises:
        DataError: a worker could not start, or ended before its work was done.
    """
    if num_proc is None:
        with contextlib.closing(_pipelined(job, tasks)) as done:
            yield from collect_per_batch(done)
        return
    if num_proc == 1:
        with _one_thread():
            yield from collect_per_batch(map(Processor(job), tasks))
        return
    # A function without a name to import cannot be sent; then rows are read here, and tokenised there.
    local = job.preprocess is not None and ":" not in job.preprocess.name
    sent = attrs.evolve(job, preprocess=None) if local else job
    pending = (read(task, job) if local and isinstance(task, Task) else task for task in tasks)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(worker_directory())
        workers = [_Worker(stack, folder) for _ in range(num_proc)]
        for worker in workers:
            worker.connect(stack, sent)
        yield from _in_order(workers, pending)


def _pipelined(job: Job, tasks: "Iterator[Task | Preprocessed]") -> Generator[Batch, None, None]:
    """Make batches in this process, while the tokenizer works on the next task in a thread.

    The tokenizer is not Python, so meanwhile this thread finishes the task before and begins the one after.
    """
    thread = ThreadPoolExecutor(1, "forge-data-tokenizer")
    try:
        processor = Processor(job, thread)
        started = None
        for task in tasks:
            following = processor.begin(task)
            if started is not None:
                yield processor.finish(started)
            started = following
        if started is not None:
            yield processor.finish(started)
    finally:
        thread.shutdown(cancel_futures=True)


def _in_order(workers: "list[_Worker]", tasks: "Iterator[Task | Preprocessed]") -> Iterator[Batch]:
    numbered = enumerate(tasks)
    done: dict[int, Batch] = {}
    following = 0
    # Batches that wait for their turn are bounded: behind one slow chunk the others must not fill the memory.
    window = 2 * _TASKS_PER_WORKER * len(workers)
    free = collections.deque(worker for _ in range(_TASKS_PER_WORKER) for worker in workers)
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
    """A worker process, as its parent sees it."""

    connection: Connection

    def __init__(self, stack: contextlib.ExitStack, folder: str) -> None:
        self._key = secrets.token_hex(32)
        # Its temporary files, the socket too, lie in this process's folder and are removed with it, however it ends.
        environment = os.environ | {_PARALLELISM: "false", "TMPDIR": folder, "OMP_NUM_THREADS": "1"}
        command = [
            sys.executable,
            "-c",
            f"import sys; sys.path[:] = {sys.path!r}; from forge_data.preparing._worker import main; main()",
        ]
        self._process = subprocess.Popen(  # noqa: S603 - this Python, with a fixed command
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )
        stack.callback(self._end)

    def connect(self, stack: contextlib.ExitStack, job: Job) -> None:
        """Wait until the worker listens, and send it the job."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._worker_ended():
            self._process.stdin.write(self._key + "\n")
            self._process.stdin.flush()
            address = self._process.stdout.readline().strip()
            if not address:
                raise EOFError
            self.connection = stack.enter_context(Client(address, authkey=self._key.encode()))
        self._put(job)

    def send(self, task: "tuple[int, Task | Preprocessed]") -> None:
        """Send a task."""
        self._put(task)

    def receive(self) -> tuple[int, Batch]:
        """Receive a batch."""
        with self._worker_ended():
            number, batch = self.connection.recv()
        match batch:
            case Failure(trace):
                raise RuntimeError(f"a worker of prepare failed:\n{trace}")
            case _:
                return number, batch

    def _put(self, what: Any) -> None:
        with self._worker_ended():
            self.connection.send(what)

    @contextlib.contextmanager
    def _worker_ended(self) -> Iterator[None]:
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
                f"a worker process of prepare {how} before its work was done{why}; use fewer with `num_proc`"
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
    """Switch the tokenizer's threads off in this process.

    One worker is one thread, here as in other processes: `num_proc` alone decides how many cores are used.
    """
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before
