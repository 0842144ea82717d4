"""The numeric tests under other instruction sets and thread counts: `hatch run processors`.

torch and oneDNN choose their kernels by the processor, and sums come out in another order with each choice. A test that passes
here alone leans on one processor's rounding. What is numeric is everything but what NOT_NUMERIC lists, so that a new test is
repeated until somebody says why it need not be.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import defaultdict
from functools import partial

import lane
from repository import LANES, ROOT

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
    # MKL, whose number of threads torch takes, would else not go beyond the number of cores.
    f"{name}, {threads} thread{'s' * (threads > 1)}": {**variables, "OMP_NUM_THREADS": str(threads), "MKL_DYNAMIC": "FALSE"}
    for name, variables in {
        "native": {},
        "ATEN default": {"ATEN_CPU_CAPABILITY": "default"},
        "ATEN avx2": {"ATEN_CPU_CAPABILITY": "avx2"},
        "oneDNN AVX2": {"ONEDNN_MAX_CPU_ISA": "AVX2"},
    }.items()
    for threads in (1, 3)
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
    """Run what is not done yet, write the table, return whether anything failed."""
    parser = argparse.ArgumentParser(prog="hatch run processors", description=__doc__.splitlines()[0])
    parser.add_argument("--fresh", action="store_true", help="repeat what an interrupted lane had done")
    parser.add_argument("--only", metavar="TEXT", default="", help="only configurations whose name holds this; writes no page")
    options = parser.parse_args(arguments)
    configurations = {name: variables for name, variables in CONFIGURATIONS.items() if options.only in name}
    if not configurations:
        parser.error(f"no configuration is called {options.only!r}: {', '.join(CONFIGURATIONS)}")
    parts = chunks(numeric_files())
    state = lane.Lane("processors", fresh=options.fresh)
    for name, variables in configurations.items():
        cases = {}
        for part, files in parts.items():
            report = LANES / "processors" / f"{name}-{part}.xml".replace("/", "_").replace(" ", "_")
            cases[f"{name}: {part}"] = partial(
                lane.tests, sys.executable, *files, environ=os.environ | variables, report=report
            )
        state.run(cases, workers=max(1, (os.cpu_count() or 1) // int(variables["OMP_NUM_THREADS"])))
    results = {name: {part: state.done[f"{name}: {part}"] for part in parts} for name in configurations}
    body, failed = summary(results)
    if options.only:
        print(f"\n{body}")
    else:
        lane.page("processors", "Numeric tests on other processors", "hatch run processors", body)
    return int(failed)


def summary(results: dict[str, dict[str, lane.Result]]) -> tuple[str, bool]:
    """Return a table of passed and failed tests by folder and configuration, and whether any failed."""
    names = list(results)
    parts = list(results[names[0]])
    rows = []
    for part in parts:
        cells = [results[name][part] for name in names]
        rows.append(
            [part, *(f"{cell['passed']}" + f", **{len(cell['failed'])} failed**" * bool(cell["failed"]) for cell in cells)]
        )
    totals = {name: sum(cell["passed"] for cell in results[name].values()) for name in names}
    rows.append(["**all**", *(str(total) for total in totals.values())])
    lost = [f"- {name}: `{test}`" for name in names for cell in results[name].values() for test in cell["failed"]]
    told = "\n\nFailed:\n\n" + "\n".join(lost) if lost else "\n\nNone failed."
    skipped = "\n".join(f"- {entry}: {why}" for entry, why in NOT_NUMERIC.items())
    text = "Tests that passed, by folder and by how torch and oneDNN were told to compute.\n\n"
    text += lane.table(["tests", *names], rows) + told
    return text + f"\n\nNot repeated, for they compute no floating-point numbers:\n\n{skipped}\n", bool(lost)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
