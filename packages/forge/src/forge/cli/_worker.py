"""Process of one rank that a launcher started.

`python -m forge.cli._worker MODULE VERB SETTINGS.json`, where MODULE defines VERB.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path

import forge_dist
from forge._error_chain import error_chain
from forge._errors import PreemptedError
from forge._uncollected import process_of_one_command
from forge.run._launching import ROWS, read_settings
from forge.run._rows import tokenized_rows


class _Termination:
    """Handler of a SIGTERM before there is a state: it raises, and remembers that it did.

    Raised in the middle of an import the exception may come out as another one.
    """

    came = False
    _last = -math.inf

    def __call__(self, *_: object) -> None:
        before, self._last = self._last, time.monotonic()
        if self.came and self._last - before < forge_dist.same_signal_seconds():
            return
        self.came = True
        raise KeyboardInterrupt


def main(module: str, verb: str, settings: str) -> None:
    """Run one rank of a verb; the launcher prints an error that is an answer to the user."""
    termination = _Termination()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, termination)
    try:
        with forge_dist.worker_report():
            try:
                from forge.backends._train import train

                task, file = getattr(import_module(module), verb).task, Path(settings)
                train(task, read_settings(task, file), tokenized_rows(file.with_name(ROWS)))
            except PreemptedError as stopped:
                # Its state is saved: a second signal is not to give another status.
                for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1):
                    signal.signal(number, signal.SIG_IGN)
                raise SystemExit(stopped.exit_status) from None
            except BaseException as error:
                # The launcher sends SIGTERM to what outlives another rank's end. This process is ending, and the signal is not
                # to take away what it has to say.
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                if termination.came:
                    # It may have come while an error was on its way here.
                    _keep_in_log(next(filter(_follows_from_peer, error_chain(error)), None), Path(settings).parent)
                    # What was prepared is removed by now; the launcher is to see the signal.
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    os.kill(os.getpid(), signal.SIGTERM)
                raise
    except KeyboardInterrupt:
        # Python still ends as the signal does, without a stack that is no answer to the user.
        sys.excepthook = lambda *_: None
        raise
    except Exception as error:
        status = getattr(error, "exit_status", None)
        kept = status is None and _follows_from_peer(error) and _keep_in_log(error, Path(settings).parent)
        # The error is reported; a launcher that ends this process meanwhile would interrupt what Python does at its exit.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if status is None and not kept:
            raise
        raise SystemExit(status or 1) from None


def _follows_from_peer(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone.

    The launcher names the one that was first.
    """
    return isinstance(error, Exception) and forge_dist.follows_from_peer(error)


def _keep_in_log(error: BaseException | None, logs: Path) -> bool:
    """Write an error's traceback to the rank's log alone; return whether it is there."""
    if error is None:
        return False
    try:
        with (logs / f"rank_{os.environ['RANK']}.log").open("a", encoding="utf-8") as log:
            log.writelines(traceback.format_exception(error))
    except (OSError, KeyError):
        return False
    return True


if __name__ == "__main__":
    process_of_one_command()
    main(*sys.argv[1:])
