"""Seconds in which a command loads torch, before its own first line → a line that says so."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from forge._stderr import StandardError

_PATIENCE_SECONDS = 1.0
"""Seconds that may pass without a word."""
_POLL_SECONDS = 0.1
_MOST_SECONDS = 60.0


@contextmanager
def telling_of_torch(verb: str, *, quiet: bool) -> Iterator[None]:
    """Print once on stderr that torch is being loaded, where that takes more than a second.

    Only the first rank does, and none with `quiet`, or where torch is loaded already.
    """
    if quiet or "torch" in sys.modules or os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) != "0":
        yield
        return
    ended = threading.Event()
    threading.Thread(target=_tell, args=(verb, ended), name="loading torch", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _tell(verb: str, ended: threading.Event) -> None:
    began = time.monotonic()
    while not ended.wait(_POLL_SECONDS):
        seconds, torch = time.monotonic() - began, sys.modules.get("torch")
        # What the import system itself asks of a module that another thread is importing.
        if (torch is not None and not getattr(torch.__spec__, "_initializing", False)) or seconds > _MOST_SECONDS:
            return
        if torch is not None and seconds >= _PATIENCE_SECONDS:
            print(f"forge {verb}: loading torch ...", file=StandardError(), flush=True)
            return
