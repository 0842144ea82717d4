"""A worker whose launcher was killed ends: nobody else would end it, and the next run would find it writing."""

import os
import sys
import threading
import time

_LOOK_SECONDS = 0.5


def leave_with_launcher(launcher: int) -> None:
    """From now on, end this process (status 1) soon after the process `launcher`, its parent, is gone."""
    threading.Thread(target=_watch, args=(launcher,), name="forge-launcher-watch", daemon=True).start()


def _watch(launcher: int) -> None:
    # A process whose parent died is handed to another one; asking for the parent has no race with a process id that is used again.
    while os.getppid() == launcher:
        time.sleep(_LOOK_SECONDS)
    # The launcher read this process's output, so its end is all that can be told, and not even that is sure to be heard.
    try:
        os.write(2, f"forge: the launcher (process {launcher}) is gone, and this rank leaves\n".encode())
    except OSError:
        pass
    finally:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]
        os._exit(1)
