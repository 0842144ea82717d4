"""A run of the command `forge` that hangs at a chosen step of a chosen rank: `sitecustomize.py` for its processes.

Every Python process that finds this folder's copy reads it at its start; a rank that calls the optimizer hangs, once.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any


def hang(how: str) -> None:
    """Stand still: stopped, asleep in Python, or in native code that holds Python's lock."""
    if how == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
        # The call may return before all threads stand still.
        time.sleep(600)
    elif how == "native":
        # A lock that this thread has already: unlike sleep, no signal ends the wait. PyDLL keeps Python's lock meanwhile.
        lock = ctypes.create_string_buffer(64)
        while True:
            ctypes.PyDLL(None).pthread_mutex_lock(lock)
    else:
        time.sleep(600)


def patch(rank: str, step: int, how: str, mark: Path) -> None:
    """Hang in the optimizer's step, unless the mark says that it was done; or step slowly until it is there."""
    while not hasattr(sys.modules.get("torch.optim"), "AdamW"):
        time.sleep(0.02)
    from torch.optim import AdamW

    original: Any = AdamW.step
    calls = 0

    def stepping(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if how == "slowly":
            time.sleep(0.0 if mark.exists() else 1.0)
        elif calls == step and not mark.exists() and os.environ.get("RANK", "0") == rank:
            mark.write_text(str(os.getpid()))
            hang(how)
        return original(*args, **kwargs)

    AdamW.step = stepping  # type: ignore[method-assign]


if os.environ.get("FORGE_TEST_HANG"):
    rank, step, how, mark = os.environ["FORGE_TEST_HANG"].split(" ", 3)
    threading.Thread(target=patch, args=(rank, int(step), how, Path(mark)), daemon=True).start()
