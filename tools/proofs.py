"""The tests that take too long for CI, one after another: `hatch run proofs` runs those marked `lane`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial

import lane
from repository import LANES, ROOT


def marked() -> list[str]:
    """Return the ids of all tests marked `lane`."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "lane", "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]
    if done.returncode or not found:
        raise SystemExit(f"pytest found no test marked `lane`:\n{done.stdout}{done.stderr}")
    return found


def main(arguments: list[str]) -> int:
    """Run what is not done yet, write the table, return whether anything failed."""
    parser = argparse.ArgumentParser(prog="hatch run proofs", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    options = parser.parse_args(arguments)
    state = lane.Lane("proofs", fresh=options.fresh)
    cases = {}
    for number, test in enumerate(marked()):
        report = LANES / "proofs" / f"{number}.xml"
        cases[test] = partial(lane.tests, sys.executable, "-m", "lane", test, environ=dict(os.environ), report=report)
    # One at a time: each starts processes of its own.
    state.run(cases)
    body, failed = summary({test: state.done[test] for test in cases})
    lane.page("proofs", "Tests that take long", "hatch run proofs", body)
    return int(failed)


def summary(results: dict[str, lane.Result]) -> tuple[str, bool]:
    """Return a table of the tests and what came of each, and whether any failed or was skipped throughout."""
    rows = [[f"`{test}`", result["says"]] for test, result in results.items()]
    return lane.table(["test", "result"], rows), any(result["failed"] for result in results.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
