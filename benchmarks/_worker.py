"""One trainer, driven step by step over a pipe (protocol: `_lockstep.py`). Started by a benchmark with a job file.

The sides live in files of their own, each with `run(job, rows, session)`: `_side_forge.py`, `_side_bare.py`, `_side_trl.py`.
"""

import importlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from _lockstep import peak_rss_bytes, rss_bytes, worker_channel


class Session:
    """Connection of a side to the benchmark: it reports that it is ready, then each step, and waits for the next."""

    def __init__(self, channel: Any, side: str, *, accelerated: bool) -> None:
        self._channel, self._side, self._accelerated = channel, side, accelerated
        self._start = self._cpu_start = 0.0
        self._before = 0

    def ready(self) -> None:
        """Report that everything is loaded, before the first step."""
        import torch

        self._before = rss_bytes()
        if self._accelerated:
            torch.accelerator.reset_peak_memory_stats()
        self._write({"ready": self._side, "threads": torch.get_num_threads()})
        self._wait()

    def step_done(self, **figures: float) -> None:
        """Report one optimizer step with its figures and seconds."""
        if self._accelerated:
            import torch

            torch.accelerator.synchronize()
        seconds, cpu_seconds = time.perf_counter() - self._start, time.process_time() - self._cpu_start
        self._write({**figures, "seconds": seconds, "cpu_seconds": cpu_seconds})
        self._wait()

    def _wait(self) -> None:
        word = sys.stdin.readline().strip()
        if word != "step":
            self._finish()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()

    def _finish(self) -> None:
        import torch

        device = torch.accelerator.max_memory_allocated() if self._accelerated else None
        self._write({"peak_rss_bytes": peak_rss_bytes(), "rss_before_steps_bytes": self._before, "peak_device_bytes": device})
        # A trainer in mid-run has nothing here to save, and unwinding it would only cost time.
        sys.stderr.flush()
        os._exit(0)

    def _write(self, answer: dict[str, Any]) -> None:
        self._channel.write(json.dumps(answer) + "\n")
        self._channel.flush()


def main() -> None:
    """Run the side that the job names until the benchmark ends it."""
    channel = worker_channel()
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import torch
    from _rows import read_rows

    session = Session(channel, job["side"], accelerated=job["device"] != "cpu" and torch.accelerator.is_available())
    importlib.import_module(f"_side_{job['side']}").run(job, read_rows(Path(job["rows"])), session)
    raise SystemExit(f"side {job['side']!r} ran out of rows before the benchmark ended it")


if __name__ == "__main__":
    main()
