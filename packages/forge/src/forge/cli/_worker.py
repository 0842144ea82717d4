"""What a launcher starts for each rank: `python -m forge.cli._worker COMMAND SETTINGS.json`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import forge_dist
from forge._errors import PreemptedError
from forge.run._launching import read_settings


class _Termination:
    """SIGTERM before there is a state: an exception on its way through the clean-up, and the memory of it.

    Raised in the middle of an import it may come out as something else.
    """

    came = False

    def __call__(self, *_: object) -> None:
        self.came = True
        raise KeyboardInterrupt


def main(command: str, settings: str) -> None:
    """Run one rank of a command to its end. An error that is an answer to the user is said by the launcher alone."""
    termination = _Termination()
    signal.signal(signal.SIGTERM, termination)
    try:
        with forge_dist.worker_report():
            try:
                from forge.run._run import run
                from forge.verbs._registry import task_of

                task = task_of(command)
                run(task, read_settings(task, Path(settings)))
            except PreemptedError as stopped:
                raise SystemExit(stopped.exit_status) from None
            except BaseException:
                if termination.came:
                    # What was prepared is taken back by now; the launcher is to see the signal.
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.kill(os.getpid(), signal.SIGTERM)
                raise
    except Exception as error:
        status = getattr(error, "exit_status", None)
        if status is None:
            raise
        raise SystemExit(status) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
