"""A lane's case → its answers, of a process of its own that may crash or hang.

Processes are forked from a server that imports a module once, which takes longer than most cases.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import multiprocessing.context
import multiprocessing.process
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from repository import LANES, ROOT


class Ended(NamedTuple):
    """What a process has come to."""

    answers: Any
    """What the function returned; None where the process ended without."""
    says: str
    """How it ended, and the file of what it printed."""


def answers_of(module: str, arguments: Sequence[Any], *, lane: str, case: str, seconds: float) -> Ended:
    """Call `module.answers(*arguments)`, whose answers are JSON; files of the case lie in the folder of the lane."""
    folder = LANES / lane
    folder.mkdir(parents=True, exist_ok=True)
    file, output = folder / f"{case}.json", folder / f"{case}.txt"
    file.unlink(missing_ok=True)
    process = _server(module).Process(target=_into_files, args=(module, tuple(arguments), str(file), str(output)))
    process.start()
    ended = wait(process, seconds)
    found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    return Ended(found, f"its process {ended}: {output}")


@cache
def _server(module: str) -> multiprocessing.context.ForkServerContext:
    # Python 3.11 hands its path on to the forks, and not to the server.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT / "tools"), os.environ.get("PYTHONPATH")]))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    return context


def wait(process: multiprocessing.process.BaseProcess, seconds: float) -> str:
    """Wait for a process, end it with its group where it takes longer, and return how it ended."""
    process.join(seconds)
    if not process.is_alive():
        return f"ended with exit status {process.exitcode}"
    assert process.pid is not None
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
    return f"did not end within {seconds:g} s"


def _into_files(module: str, arguments: Sequence[Any], answers: str, output: str) -> None:
    """Write the answers to a file, with all that is printed in the file `output`."""
    # A group of its own, which can be ended with the ranks that a case starts.
    os.setpgid(0, 0)
    with Path(output).open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    found = importlib.import_module(module).answers(*arguments)
    Path(answers).write_text(json.dumps(found), encoding="utf-8")
