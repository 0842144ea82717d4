"""What takes too long for CI, one test file after another: `hatch run proofs`.

Runs the tests marked `lane`, which CI leaves out, and every Hypothesis test with all of the examples that it asks for, of
which CI draws a part (`tests/conftest.py`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from functools import partial

import lane
from repository import LANES, ROOT

SELECTED = ["-m", "lane or hypothesis", "--hypothesis-profile=full"]
"""pytest's arguments that select the tests, and all of their examples."""


def files() -> list[str]:
    """Return the test files that have a selected test."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *SELECTED, "-p", "no:cacheprovider", "tests"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = [line for line in done.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", "FAILED"))]
    if done.returncode or not found:
        raise SystemExit(f"pytest found no test for this lane:\n{done.stdout}{done.stderr}")
    return list(dict.fromkeys(line.partition("::")[0] for line in found))


def main(arguments: list[str]) -> int:
    """Run what is not done yet, write the table, return whether anything failed."""
    parser = argparse.ArgumentParser(prog="hatch run proofs", description=__doc__)
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    options = parser.parse_args(arguments)
    state = lane.Lane("proofs", fresh=options.fresh)
    cases = {}
    for file in files():
        report = LANES / "proofs" / f"{file.removesuffix('.py').replace('/', '.')}.xml"
        cases[file] = partial(lane.tests, sys.executable, *SELECTED, file, environ=dict(os.environ), report=report)
    # One at a time: many start processes of their own. A file's tests share what they prepare.
    state.run(cases)
    body, failed = summary({file: state.done[file] for file in cases})
    lane.page("proofs", "Tests that take long", "hatch run proofs", body)
    return int(failed)


def summary(results: dict[str, lane.Result]) -> tuple[str, bool]:
    """Return a table of the files and what came of each, with the names of what failed; and whether any test did."""
    rows = [[f"`{file}`", result["says"]] for file, result in results.items()]
    failed = [f"- `{name}`" for result in results.values() for name in result["failed"]]
    body = lane.table(["tests", "result"], rows)
    return (f"{body}\n{len(failed)} failed:\n\n" + "\n".join(failed) + "\n" if failed else body), bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
