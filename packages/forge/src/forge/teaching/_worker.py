"""Process that writes its share of a stored teacher's parts.

`python -m forge.teaching._worker JOB.json`, which `_processes` starts.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import forge_data
import forge_dist
from forge._errors import PreemptedError
from forge._progress import Reporter
from forge.tasks.items._stored_teacher import part_file, write_part
from forge.teaching._asked import Asking


def main(file: str) -> None:
    """Write the parts that a launcher left to this rank."""
    job = json.loads(Path(file).read_text(encoding="utf-8"))
    folder, share = Path(job["folder"]), job["shares"][int(os.environ["RANK"])]
    asking = Asking(**job["asking"])
    if share:
        asking(
            {int(number): part for number, part in share.items()},
            forge_data.TokenStore.open(asking.store),
            lambda number, part: write_part(part_file(folder, number), part, job["key"]),
            Reporter(lambda _: None),
        )


def _stop(*_: object) -> None:
    raise SystemExit(PreemptedError.exit_status)


if __name__ == "__main__":
    for _signal in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(_signal, _stop)
    try:
        with forge_dist.worker_report():
            main(sys.argv[1])
    except Exception as error:
        status = getattr(error, "exit_status", None)
        if status is None:
            raise
        # It is reported, and the command says it: without a stack.
        sys.exit(status)
