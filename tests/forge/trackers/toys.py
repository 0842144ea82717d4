"""Trackers of the tests, named by entry points of a distribution that is written beside them."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

SOURCE = Path(__file__)
NAMES = ("toy_good", "toy_raising", "toy_hanging", "toy_dying")


def install(folder: Path) -> Path:
    """Write this module and its entry points to a folder that may be put on the path."""
    about = folder / "forge_toy_trackers-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: forge-toy-trackers\nVersion: 1\n")
    lines = "".join(f"{name} = forge_toy_trackers:{name}\n" for name in NAMES)
    (about / "entry_points.txt").write_text(f"[forge.trackers]\n{lines}")
    (folder / "forge_toy_trackers.py").write_text(SOURCE.read_text())
    return folder


def got(run: Path, name: str) -> list[Any]:
    """What a toy was sent."""
    file = run / "trackers" / f"{name}.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


class _Toy:
    """Write what is sent to a file; `trouble` is called before each line."""

    def __init__(self, run: Any, name: str, trouble: Any) -> None:
        self._run, self._trouble = run, trouble
        self._file = run.files / f"{name}.jsonl"

    def start(self) -> None:
        self._write(["start", self._run.id])

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._write(["settings", values])

    def log(self, values: dict[str, float], step: int) -> None:
        self._trouble(self._run, step)
        self._write([step, values])

    def finish(self) -> None:
        self._write(["finish"])

    def _write(self, what: list[Any]) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(what) + "\n")


def toy_good(run: Any) -> _Toy:
    """A tracker that takes everything."""
    return _Toy(run, "toy_good", lambda run, step: None)


def toy_raising(run: Any) -> _Toy:
    """A tracker that raises at step 2 until a file says that it is back."""

    def trouble(run: Any, step: int) -> None:
        if step == 2 and not (run.files / "back").exists():
            raise ConnectionError("the network is away")

    return _Toy(run, "toy_raising", trouble)


def toy_hanging(run: Any) -> _Toy:
    """A tracker that never returns from step 2."""
    return _Toy(run, "toy_hanging", lambda run, step: threading.Event().wait() if step == 2 else None)


def toy_dying(run: Any) -> _Toy:
    """A tracker that ends its process at step 2."""
    return _Toy(run, "toy_dying", lambda run, step: os._exit(7) if step == 2 else None)
