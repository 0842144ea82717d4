"""The numeric tests under other instruction sets and thread counts: `hatch run processors`.

torch and oneDNN choose their kernels by the processor, and sums come out in another order with each choice. A test that passes
here alone leans on one processor's rounding. What is numeric is everything but what NOT_NUMERIC lists, so that a new test is
repeated until somebody says why it need not be.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import lane
from repository import LANES, RESULTS, ROOT, commit

NOT_NUMERIC = {
    "tests/forge-data": "integers and text: no torch",
    "tests/forge-packing": "integers: no torch",
    "tests/tools": "the tools of this repository",
    "tests/forge": "the command line, pages and tables; its numbers are those of tests/whole",
    "tests/forge-dist/launching": "processes, signals and their exit statuses",
    "tests/forge-dist/environment": "words and files of the launching environment",
    "tests/whole/test_bad_input.py": "error messages",
    "tests/whole/test_benchmarks.py": "benchmarks at toy size",
    "tests/whole/test_data_lint.py": "the lint's command line",
    "tests/whole/test_doctests.py": "examples in docstrings",
    "tests/whole/test_public_api.py": "a law of the sources",
    "tests/whole/test_environments.py": "a law of the sources",
    "tests/whole/test_error_laws.py": "a law of the sources",
    "tests/whole/test_launched.py": "processes, signals and their exit statuses",
    "tests/whole/test_laws.py": "a law of the sources",
    "tests/whole/test_layers.py": "a law of the sources",
    "tests/whole/test_pages.py": "a law of the pages",
    "tests/whole/test_settings_laws.py": "a law of the sources",
}

CONFIGURATIONS = {
    # Each choice by itself: they change the order of a sum independently of each other. MKL, whose number of threads torch
    # takes, would else not go beyond the number of cores.
    f"{name}, {threads} thread{'s' * (threads > 1)}": {**variables, "OMP_NUM_THREADS": str(threads), "MKL_DYNAMIC": "FALSE"}
    for name, threads, variables in (
        ("native", 1, {}),
        ("native", 3, {}),
        ("ATEN default", 1, {"ATEN_CPU_CAPABILITY": "default"}),
        ("ATEN avx2", 1, {"ATEN_CPU_CAPABILITY": "avx2"}),
        ("oneDNN AVX2", 1, {"ONEDNN_MAX_CPU_ISA": "AVX2"}),
    )
}


def numeric_files() -> list[str]:
    """Return every test file but those that NOT_NUMERIC lists, itself or by its folder."""
    files = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob("tests/**/test_*.py"))
    return [file for file in files if not any(file == entry or file.startswith(f"{entry}/") for entry in NOT_NUMERIC)]


def chunks(files: list[str], most: int = 8) -> dict[str, list[str]]:
    """Return the files by folder, eight at most together: one start of pytest each, and one step of the lane."""
    folders = defaultdict(list)
    for file in files:
        parts = file.split("/")
        folders["/".join(parts[: 3 if len(parts) > 3 else 2])].append(file)
    cut = {folder: [own[first : first + most] for first in range(0, len(own), most)] for folder, own in folders.items()}
    return {f"{folder} {number}": part for folder, parts in cut.items() for number, part in enumerate(parts, 1)}


def main(arguments: list[str]) -> int:
    """Run what is not done yet, write each configuration's line, return whether anything failed."""
    parser = argparse.ArgumentParser(prog="hatch run processors", description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    parser.add_argument("--only", metavar="TEXT", default="", help="only configurations whose name holds this")
    parser.add_argument("--failed", action="store_true", help="only the tests that the page says have failed")
    options = parser.parse_args(arguments)
    configurations = {name: variables for name, variables in CONFIGURATIONS.items() if options.only in name}
    if not configurations:
        parser.error(f"no configuration is called {options.only!r}: {', '.join(CONFIGURATIONS)}")
    if options.failed:
        return repeat(configurations)
    parts = chunks(numeric_files())
    state = lane.Lane("processors", fresh=options.fresh)
    # Asked before the page is written, which would be a change that is not committed.
    here = commit()
    failed: list[str] = []
    for name, variables in configurations.items():
        cases = {
            f"{name}: {part}": partial(
                lane.tests, sys.executable, *files, environ=os.environ | variables, report=report_of(f"{name}-{part}")
            )
            for part, files in parts.items()
        }
        state.run(cases, workers=max(1, (os.cpu_count() or 1) // int(variables["OMP_NUM_THREADS"])))
        # One after the other: all take more than an hour, and what has ended stays said.
        results = [state.done[case] for case in cases]
        failed += write(
            name, here, sum(each["passed"] for each in results), [test for each in results for test in each["failed"]]
        )
    return int(bool(failed))


def report_of(case: str) -> Path:
    """Return where pytest writes the report of a case."""
    return LANES / "processors" / f"{case}.xml".replace("/", "_").replace(" ", "_")


def repeat(configurations: Mapping[str, Mapping[str, str]], home: Path = RESULTS) -> int:
    """Run again the tests that the page says have failed, write what passes by now, return whether any fails still."""
    still, here = False, commit()
    for name, variables in configurations.items():
        lines = lines_of(home)[name]
        left = [test for test, mended in lines.failed.items() if not mended]
        for test in left:
            found = lane.tests(sys.executable, test, environ=os.environ | variables, report=report_of(f"{name}-failed"))
            print(f"{name}: {test}: {found['says']}", flush=True)
            if found["failed"]:
                still = True
            else:
                lines.failed[test] = f"passes at {here}"
        if left:
            put(name, lines, home)
    return int(still)


@dataclass
class Lines:
    """What the page says of one configuration."""

    row: str = ""
    """Cells of its row after its name; empty where it was never run."""
    failed: dict[str, str] = field(default_factory=dict)
    """Failed test → what was said of it since, such as `passes at 1a2b3c4`; empty for nothing."""


def lines_of(home: Path = RESULTS) -> dict[str, Lines]:
    """Read what the page says of each configuration."""
    page = home / "processors.md"
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    found = {}
    for name in CONFIGURATIONS:
        row = re.search(rf"^\| {re.escape(name)} \| (.*\d.*) \|$", text, re.MULTILINE)
        failed = re.findall(rf"^- {re.escape(name)}: `([^`]+)`(?:, (.+))?$", text, re.MULTILINE)
        found[name] = Lines(row[1] if row else "", dict(failed))
    return found


def write(name: str, of: str, passed: int, failed: list[str], home: Path = RESULTS) -> list[str]:
    """Write what a configuration's run of a commit has come to, and return its failures."""
    cells = [lane.today(), of, lane.machine(), str(passed), str(len(failed))]
    put(name, Lines(" | ".join(cells), dict.fromkeys(failed, "")), home)
    return failed


def put(name: str, lines: Lines, home: Path = RESULTS) -> None:
    """Write the page with one configuration's lines, and all others' as they are."""
    known = lines_of(home) | {name: lines}
    rows = [[other, each.row or "not run | | | | "] for other, each in known.items()]
    text = (
        "# Numeric tests on other processors\n\nWritten by `hatch run processors`: of each configuration, how torch and oneDNN "
        "were told to compute, the last run.\n\n"
    )
    text += lane.table(["configuration", "date", "commit", "machine", "passed", "failed"], rows)
    lost = [
        f"- {other}: `{test}`" + (f", {since}" if since else "")
        for other, each in known.items()
        for test, since in each.failed.items()
    ]
    text += "\nFailed:\n\n" + "\n".join(lost) if lost else "\nNone failed."
    skipped = "\n".join(f"- {entry}: {why}" for entry, why in NOT_NUMERIC.items())
    text += f"\n\nNot repeated, for they compute no floating-point numbers:\n\n{skipped}\n"
    home.mkdir(parents=True, exist_ok=True)
    (home / "processors.md").write_text(text, encoding="utf-8")
    print(f"\n{name}: {lines.row}\n{home / 'processors.md'}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
