"""Cases that take long → their results, kept from one start to the next, and a dated table of them.

A lane is what is worth knowing and too long for CI. Its state lies in .lanes/NAME.json: a lane that was interrupted goes on
where it stopped, unless the sources differ by then. Its result is a page of docs/lanes/, which is committed.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import suite
from repository import LANES, RESULTS, commit, fingerprint

Result = dict[str, Any]
"""What a case has come to, as JSON holds it; `says` is its one line."""


class Lane:
    """Results by case, on disk, of one state of the sources."""

    def __init__(self, name: str, *, fresh: bool = False, home: Path = LANES, sources: str | None = None) -> None:
        self.name = name
        self._file = home / f"{name}.json"
        self._sources = fingerprint() if sources is None else sources
        self._lock = threading.Lock()
        self.done: dict[str, Result] = {}
        home.mkdir(parents=True, exist_ok=True)
        if self._file.is_file() and not fresh:
            state = json.loads(self._file.read_text(encoding="utf-8"))
            if state["sources"] == self._sources:
                self.done = state["done"]
                print(f"{name}: {len(self.done)} cases were done before (--fresh repeats them)", flush=True)
            else:
                print(f"{name}: the sources differ from those of the interrupted lane, so it starts anew", flush=True)

    def run(self, cases: Mapping[str, Callable[[], Result]], workers: int = 1) -> None:
        """Run the cases that are not done, several at a time; a case that fails is a result, and the lane goes on."""
        left = {name: case for name, case in cases.items() if name not in self.done}

        def one(item: tuple[str, Callable[[], Result]]) -> None:
            name, case = item
            result = case()
            with self._lock:
                self.done[name] = result
                partial = self._file.with_suffix(".tmp")
                partial.write_text(json.dumps({"sources": self._sources, "done": self.done}, indent=1), encoding="utf-8")
                partial.replace(self._file)
                print(f"[{sum(case in self.done for case in cases)}/{len(cases)}] {name}: {result['says']}", flush=True)

        pool = ThreadPoolExecutor(workers)
        try:
            for _ in pool.map(one, left.items()):
                pass
        finally:
            pool.shutdown(cancel_futures=True)


def tests(python: str, *arguments: str, environ: dict[str, str], report: Path) -> Result:
    """Run pytest and return a lane's result; what it printed is kept beside its report, as .txt."""
    began = time.monotonic()
    found = suite.run(python, *arguments, report=report, environ=environ, output=report.with_suffix(".txt"))
    seconds = round(time.monotonic() - began)
    return {"says": f"{found} in {seconds} s", "passed": found.passed, "failed": found.failed}


def page(name: str, title: str, command: str, body: str, home: Path = RESULTS) -> Path:
    """Write docs/lanes/NAME.md: title, origin, body."""
    home.mkdir(parents=True, exist_ok=True)
    path = home / f"{name}.md"
    path.write_text(f"# {title}\n\n{origin(command)}\n\n{body.rstrip()}\n", encoding="utf-8")
    print(f"\n{body.rstrip()}\n\n{path}")
    return path


def origin(command: str) -> str:
    """Return the sentence that says where a result comes from: command, date, commit, machine."""
    return f"Written by `{command}` on {today()}, of commit {commit()}, on {machine()}."


def today() -> str:
    """Return the date, in UTC."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def machine() -> str:
    """Return the processor, the number of cores and the Python that a result was measured with."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "").split()
    widest = next((flag for flag in ("avx512_bf16", "avx512f", "avx2") if flag in flags), "")
    processor = f"{named[0] if named else platform.machine()}{f' ({widest})' if widest else ''}"
    return f"{processor}, {os.cpu_count()} cores, Python {platform.python_version()}"
