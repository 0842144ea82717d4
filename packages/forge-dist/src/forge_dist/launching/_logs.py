"""Copies of the workers' output: in `rank_N.log`, and rank 0's also on the terminal."""

import os
import selectors
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TextIO

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs

from forge_dist.launching._rendezvous import Rendezvous
from forge_dist.launching._signals import Interrupted
from forge_dist.ranks._failure_report import BEATS, LAUNCHER, REPORT
from forge_dist.ranks._messages import SECRET
from forge_dist.ranks._store import ROUND

_CHUNK = 1 << 16


class Logs(LogsSpecs):
    """Logs of the workers, for torch's agent; also adds to each worker's environment."""

    def __init__(
        self, log_dir: Path, reports: Path, rendezvous: Rendezvous, environ: Mapping[str, str], signals: list[int]
    ) -> None:
        super().__init__(str(log_dir))
        self._reports, self._rendezvous, self._environ, self._signals = reports, rendezvous, environ, signals
        self._selector = selectors.DefaultSelector()
        self._files: list[IO[bytes]] = []
        self._descriptors: list[int] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._pump, name="forge-logs", daemon=True)
        self._starts = 0
        self._closed = False
        self.report_of: dict[int, Path] = {}
        """Local rank → report file of its newest process."""
        self.log_of: dict[int, Path] = {}
        """Local rank → log file."""
        self.beats_of: dict[int, tuple[int, Path]] = {}
        """Local rank → rank, and the file of its newest process's beats."""
        self.log_dir = log_dir
        """Folder of the logs."""

    def __enter__(self) -> "Logs":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def root_log_dir(self) -> str:
        """Folder of the logs."""
        return str(self.log_dir)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Open the pipes of a start, and extend each worker's environment; torch's agent calls it.

        `envs`: local rank → the environment that the worker is about to get; changed in place.
        """
        outs: dict[int, str] = {}
        errs: dict[int, str] = {}
        errors: dict[int, str] = {}
        if self._signals:
            # Workers that are to end are not started once more.
            raise Interrupted
        self._starts += 1
        with self._lock:
            for local_rank, env in envs.items():
                rank = env["RANK"]
                log = self.log_dir / f"rank_{rank}.log"
                report = self._reports / f"{self._starts}_{rank}.json"
                self.log_of[local_rank], self.report_of[local_rank] = log, report
                beats = self._reports / f"{self._starts}_{rank}.beats"
                self.beats_of[local_rank] = int(rank), beats
                env.update(self._environ)
                env.update({REPORT: str(report), BEATS: str(beats), LAUNCHER: str(os.getpid()), ROUND: self._rendezvous.round})
                env[SECRET] = self._rendezvous.secret
                # What is printed is streamed, and is kept when the process is killed.
                env.setdefault("PYTHONUNBUFFERED", "1")
                file = log.open("ab", buffering=0)
                self._files.append(file)
                shown: tuple[TextIO | None, TextIO | None] = (sys.stdout, sys.stderr) if rank == "0" else (None, None)
                outs[local_rank] = self._pipe(file, shown[0])
                errs[local_rank] = self._pipe(file, shown[1]) if rank == "0" else outs[local_rank]
                errors[local_rank] = str(report)
        if self._thread.ident is None:
            self._thread.start()
        return LogsDest(stdouts=outs, stderrs=errs, error_files=errors)

    def _pipe(self, file: IO[bytes], shown: TextIO | None) -> str:
        """Open a pipe that is copied to `file` and `shown`; return the path of its writing end.

        A path, because that is what the agent opens; it would truncate a file.
        """
        read, write = os.pipe()
        os.set_blocking(read, False)
        self._descriptors += [read, write]
        self._selector.register(read, selectors.EVENT_READ, (file, shown))
        return f"/dev/fd/{write}"

    def _pump(self) -> None:
        while not self._done.is_set():
            self._copy(0.2)

    def _copy(self, seconds: float) -> bool:
        """Copy the available output; return whether there was any."""
        with self._lock:
            # The lock is held for reading only: a wait under it would keep a restart from registering its pipes.
            ready = self._selector.select(0)
        if not ready:
            if seconds:
                self._done.wait(min(seconds, 0.02))
            return False
        for key, _ in ready:
            file, shown = key.data
            with suppress(BlockingIOError):
                data = os.read(key.fd, _CHUNK)
                # A full disk must not stop a worker that prints.
                with suppress(OSError):
                    file.write(data)
                if shown is not None:
                    _show(shown, data)
        return True

    def close(self) -> None:
        """Copy the remaining output and close all files.

        Does not wait for grandchildren that hold a pipe open.
        """
        if self._closed:
            return
        self._closed = True
        self._done.set()
        if self._thread.ident is not None:
            self._thread.join()
        while self._copy(0):
            pass
        self._selector.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        for file in self._files:
            file.close()


def _show(stream: TextIO, data: bytes) -> None:
    # A reader that went away (`| head`) and a stream without bytes below (a notebook's) must not end the run.
    with suppress(OSError, ValueError):
        buffer = getattr(stream, "buffer", None)
        if buffer is None:
            stream.write(data.decode("utf-8", "replace"))
        else:
            buffer.write(data)
        stream.flush()
