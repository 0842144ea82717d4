"""Claim: planning does not delay a run: the first step within 1 s of starting Python, an epoch of a million samples within 5 s.

Each run is a process of its own, imports included, as a trainer's rank starts: one reads the first step of a plan of a
million samples (batch 128, 8 ranks, 8,192 tokens), one every step of the epoch, one the last step of a plan of a billion
steps. They run in turn, after one that warms the cache of compiled code, whose time is in the line too. The ratio is the
budget over the median, the worst of the three.

    python benchmarks/packing_plan.py --repeats 7
"""

import argparse
import statistics
import subprocess
import sys
import time

from _report import emit, machine, note

MAKE = """
import sys, numpy, forge_packing
n = int(sys.argv[1])
lengths = numpy.random.default_rng(0).lognormal(6.5, 0.8, n).astype(numpy.int64).clip(1, 8192)
plan = forge_packing.plan(
    lengths, batch_size=128, max_tokens=8192, world_size=8, epochs=None, max_steps=int(sys.argv[2]), loss_counts=lengths - 1
)
"""
ASK = {
    "first step": "plan.micro_batches(0)",
    "epoch": "for step in range(-(-n // 128)): plan.micro_batches(step, step % 8), plan.loss_tokens[step]",
    "last of a billion steps": "plan.micro_batches(plan.num_steps - 1)",
}
BUDGETS = {"first step": 1.0, "epoch": 5.0, "last of a billion steps": 1.0}


def seconds(what: str, samples: int, steps: int) -> float:
    """Measure the wall-clock seconds of one process; one that fails ends the benchmark with its own message."""
    command = [sys.executable, "-c", MAKE + ASK[what], str(samples), str(steps)]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    elapsed = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(f"{what!r} ended with exit status {done.returncode}:\n{done.stderr}")
    return elapsed


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7, help="runs of each process")
    parser.add_argument("--toy", action="store_true", help="ten thousand samples, two runs: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    samples, repeats = (10_000, 2) if options.toy else (1_000_000, options.repeats)
    steps = {"first step": -(-samples // 128), "epoch": -(-samples // 128), "last of a billion steps": 10**9}
    before = seconds("first step", samples, steps["first step"])
    note(f"{'before the cache is warm':24} {before:7.3f} s")
    taken: dict[str, list[float]] = {what: [] for what in ASK}
    for _ in range(repeats):
        for what, times in taken.items():
            times.append(seconds(what, samples, steps[what]))
    median = {what: statistics.median(times) for what, times in taken.items()}
    for what, value in median.items():
        note(f"{what:24} {value:7.3f} s, budget {BUDGETS[what]:.0f} s")
    emit(
        "packing_plan",
        "budget over time of a new process: 1 s for the first step of a plan, 5 s for an epoch of a million samples; the worst",
        min(BUDGETS[what] / value for what, value in median.items()),
        1.0,
        toy=options.toy,
        at=at,
        seconds={what: round(value, 4) for what, value in median.items()},
        budget_seconds=BUDGETS,
        first_process_seconds=round(before, 4),
        sizes={"samples": samples, "batch_size": 128, "ranks": 8, "max_tokens": 8192, "repeats": repeats},
    )


if __name__ == "__main__":
    main()
