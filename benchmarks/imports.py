"""Claim: a command that trains nothing is fast: `import forge` within 100 ms over bare Python, `forge sft --help` within 0.5 s.

Each command is a process of its own, many times, interleaved with bare `python -c pass`, so that all see the same load.
`import forge` and `import forge_data` are counted over bare Python, the help as the user waits for it. The ratio is the
budget over the median, the worse of the two: 1 is exactly within budget, 2 is twice as fast as promised.

    python benchmarks/imports.py --repeats 31
"""

import argparse
import statistics
import subprocess
import sys
import time

from _report import emit, machine, note

COMMANDS = {
    "bare": [sys.executable, "-c", "pass"],
    "import forge": [sys.executable, "-c", "import forge"],
    "import forge_data": [sys.executable, "-c", "import forge_data"],
    "forge sft --help": [sys.executable, "-m", "forge", "sft", "--help"],
}
BUDGET_IMPORT = 0.100
BUDGET_HELP = 0.500


def seconds(command: list[str]) -> float:
    """Measure the wall-clock seconds of one run; a command that fails ends the benchmark with its own message."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with exit status {done.returncode}:\n{done.stderr}")
    return elapsed


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=21, help="runs of each command")
    parser.add_argument("--toy", action="store_true", help="two runs of each: seconds, and no proof")
    options = parser.parse_args()
    repeats = 2 if options.toy else options.repeats
    at = machine()
    taken: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for command in COMMANDS.values():
        seconds(command)  # warms byte-code and file caches, as on a machine in use
    for _ in range(repeats):
        for name, command in COMMANDS.items():
            taken[name].append(seconds(command))
    median = {name: statistics.median(times) for name, times in taken.items()}
    for name, value in median.items():
        note(f"{name:20} {1000 * value:7.1f} ms")
    over = median["import forge"] - median["bare"]
    emit(
        "imports",
        "budget over time: 100 ms for `import forge` over bare Python, 500 ms for `forge sft --help`; the worse of the two",
        min(BUDGET_IMPORT / max(over, 1e-4), BUDGET_HELP / median["forge sft --help"]),
        1.0,
        toy=options.toy,
        at=at,
        import_forge_over_bare_seconds=round(over, 4),
        import_forge_data_over_bare_seconds=round(median["import forge_data"] - median["bare"], 4),
        help_seconds=round(median["forge sft --help"], 4),
        bare_seconds=round(median["bare"], 4),
        budgets={"import_forge_over_bare_seconds": BUDGET_IMPORT, "help_seconds": BUDGET_HELP},
        sizes={"repeats": repeats},
    )


if __name__ == "__main__":
    main()
