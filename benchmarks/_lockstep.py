"""Trainers in processes of their own that take turns step by step: paired step times on one machine, and separate peak memory.

On a noisy machine two separate timings cannot be compared. Here every trainer waits in its own process until it is its turn,
so that step k of one is measured within seconds of step k of the other (A B, B A, A B, ...), while all the others sleep on a
pipe.

Protocol of a worker, a JSON line each: it writes {"ready": ...} to its real stdout, then for each "step" line on its stdin
does one optimizer step and writes {"seconds", "cpu_seconds", "tokens", "loss"}; at "end" it writes {"peak_rss_bytes", ...}
and exits.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _report import note

HERE = Path(__file__).resolve().parent


class WorkerError(RuntimeError):
    """End of a worker before it answered; its own message is on stderr above."""


class Worker:
    """Trainer in a process of its own. `job`, all that it needs to know, is written to `folder`."""

    def __init__(self, side: str, job: dict[str, Any], folder: Path, *, threads: int | None = None) -> None:
        self.side = side
        path = folder / f"{side}.json"
        path.write_text(json.dumps({**job, "side": side, "scratch": str(folder / side)}), encoding="utf-8")
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "TOKENIZERS_PARALLELISM": "false",
        }
        environment = {**os.environ, **quiet, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "_worker.py"), str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.ready: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Wait until the side has loaded everything; sides load at the same time, only their steps take turns."""
        self.ready = self._answer()

    def step(self) -> dict[str, Any]:
        """Let the worker do one step, and return its figures."""
        return self._ask("step")

    def end(self) -> dict[str, Any]:
        """Let the worker finish, and return its peak memory."""
        answer = self._ask("end")
        self._process.wait()
        return answer

    def kill(self) -> None:
        """Kill the process if it still runs."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _ask(self, word: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(word + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise WorkerError(f"side {self.side!r} ended with exit status {self._process.wait()} before it answered")
        return json.loads(line)


Figures = dict[str, list[dict[str, Any]]]
"""Figures of each step, by side."""


def race(
    job: dict[str, Any], folder: Path, sides: Sequence[str], steps: int, *, threads: int | None = None
) -> tuple[Figures, dict[str, Any]]:
    """Start these sides and let them take turns, each round in the opposite order of the round before.

    Returns the figures of every step, and of each side at its end (peak memory, threads).
    """
    workers: list[Worker] = []
    figures: Figures = {side: [] for side in sides}
    try:
        # Not a comprehension: where the second side cannot start, the first must be stopped.
        for side in sides:
            workers.append(Worker(side, job, folder, threads=threads))  # noqa: PERF401
        for worker in workers:
            worker.wait_until_ready()
        for step in range(steps):
            for worker in workers if step % 2 == 0 else reversed(workers):
                done = worker.step()
                figures[worker.side].append(done)
                took = f"{done['tokens']} tokens {done['seconds']:.3f} s, loss {done['loss']:.5f}"
                note(f"step {step + 1}/{steps} {worker.side:5} {took}")
        return figures, {worker.side: {**worker.ready, **worker.end()} for worker in workers}
    finally:
        for worker in workers:
            worker.kill()


def agree(figures: Figures, tolerance: float) -> dict[str, float]:
    """Return each side's first loss; end the benchmark if they differ by more than `tolerance`, relative."""
    first = {side: done[0]["loss"] for side, done in figures.items()}
    if max(first.values()) - min(first.values()) > tolerance * abs(min(first.values())):
        raise SystemExit(f"the sides do not train the same thing: losses of the first step {first}")
    return first


def worker_channel() -> Any:
    """Return a worker's real stdout as a text file, and redirect everything else that prints to stderr."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return channel


def peak_rss_bytes() -> int:
    """Read the peak memory of this process, in bytes (VmHWM of Linux)."""
    return _status("VmHWM")


def rss_bytes() -> int:
    """Read the memory that this process holds now, in bytes (VmRSS of Linux)."""
    return _status("VmRSS")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: this benchmark needs Linux")
