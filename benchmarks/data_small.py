"""Claim: a hundred rows are prepared within 2 s, imports, default settings and all checks of `prepare` included.

Every run is a process of its own, as a user's script is: it imports forge_data, loads the tokenizer from a directory of
tokenizer files and prepares 100 conversations into a new store. Bare `python -c pass` runs in turn with it, to show the
machine's load. The ratio is the budget over the median.

    python benchmarks/data_small.py --repeats 11
"""

import argparse
import importlib.util
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _data_files import file_of_rows, tokenizer_directory
from _report import emit, machine, note

BUDGET_SECONDS = 2.0
SCRIPT = "import sys, forge_data; forge_data.prepare(*sys.argv[1:4])"


def seconds(command: list[str]) -> float:
    """Measure the wall-clock seconds of one run; a command that fails ends the benchmark with its own message."""
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"ended with exit status {done.returncode}:\n{done.stderr}")
    return elapsed


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=11, help="runs of each command")
    parser.add_argument("--rows", type=int, default=100)
    parser.add_argument("--toy", action="store_true", help="one run on a small vocabulary: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = tokenizer_directory(folder, toy=options.toy)
        data = file_of_rows(folder / "train.jsonl", options.rows, toy=options.toy)
        taken: dict[str, list[float]] = {"bare": [], "prepare": []}
        for turn in range(-1, 1 if options.toy else options.repeats):
            command = [sys.executable, "-c", SCRIPT, str(data), str(tokenizer), str(folder / f"store-{turn}")]
            for name, words in (("bare", [sys.executable, "-c", "pass"]), ("prepare", command)):
                elapsed = seconds(words)
                if turn >= 0:  # the first round warms byte-code and file caches, as on a machine in use
                    taken[name].append(elapsed)
    median = {name: statistics.median(times) for name, times in taken.items()}
    note(f"prepare {median['prepare']:.2f} s, bare Python {median['bare']:.2f} s")
    emit(
        "data_small",
        f"budget over time: {options.rows} rows in {BUDGET_SECONDS:g} s, from starting Python to the store",
        BUDGET_SECONDS / median["prepare"],
        1.0,
        toy=options.toy,
        at=at,
        prepare_seconds=round(median["prepare"], 3),
        slowest_seconds=round(max(taken["prepare"]), 3),
        bare_seconds=round(median["bare"], 3),
        torch_installed=importlib.util.find_spec("torch") is not None,
        sizes={"rows": options.rows, "repeats": len(taken["prepare"])},
    )


if __name__ == "__main__":
    main()
