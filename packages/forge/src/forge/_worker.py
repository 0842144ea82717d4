"""What a launcher starts for each rank: `python -m forge._worker COMMAND SETTINGS.json`."""

from __future__ import annotations

import sys
from pathlib import Path

import forge_dist
from forge._errors import PreemptedError
from forge._launching import read_settings


def main(command: str, settings: str) -> None:
    """Run one rank of a command to its end. An error that is an answer to the user is said by the launcher alone."""
    try:
        with forge_dist.worker_report():
            from forge import _sft

            bodies = {"sft": _sft.run}
            try:
                bodies[command](read_settings(Path(settings)))
            except PreemptedError as stopped:
                raise SystemExit(stopped.exit_status) from None
    except Exception as error:
        status = getattr(error, "exit_status", None)
        if status is None:
            raise
        raise SystemExit(status) from None


if __name__ == "__main__":
    main(*sys.argv[1:])
