"""Claim: 16,384 lengths are divided over 8 ranks within 100 ms and 50 MB (mini-trainer: 2 GB); time grows as n log n.

Each side is a process of its own that divides the same lengths (lognormal chats, a budget of 8,192 tokens) once, after small
ones that compile or load compiled code; the processes run in turn. Memory is the rise of the process's peak during the first
large call. mini-trainer's call answers for one of the ranks, ours for all. Then `divide` and `pack_rows` alone, from ten
thousand lengths to ten million.

The ratio is mini-trainer's median time over ours. The script fails where our own budgets are missed at full size by more than
a busy machine explains (three times the time; the memory exactly).

    python benchmarks/packing_speed.py --repeats 3
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from _report import emit, machine, note

BUDGET_SECONDS, BUDGET_BYTES = 0.1, 50e6
COMMON = """
import json, sys, time
from pathlib import Path
import numpy as np
sys.path.insert(0, sys.argv[2])
def lengths(n):
    return np.random.default_rng(0).lognormal(7.3, 0.8, n).astype(np.int64).clip(8, 8192)
def peak():
    # VmHWM since the last reset: the peak of this call, not of what was compiled or imported before it.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024
def measure(call, n):
    data = lengths(n)
    # Small calls leave no memory behind that the large one could use; together they have enough samples to use compiled code.
    for _ in range(80):
        call(data[:512])
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    start = time.perf_counter()
    call(data)
    return {"seconds": time.perf_counter() - start, "bytes": peak() - before}
"""
SIDES = {
    "forge": """
import forge_packing
result = measure(lambda data: forge_packing.divide(data, max_tokens=8192, world_size=8), int(sys.argv[1]))
""",
    "mini_trainer": """
from _lengths import mini_trainer
pack = mini_trainer()
result = measure(lambda data: pack(data.tolist(), 8192, 8, 0), int(sys.argv[1]))
""",
    "divide": """
import forge_packing
result = measure(lambda data: forge_packing.divide(data, max_tokens=8192, world_size=8), int(sys.argv[1]))
""",
    "pack_rows": """
import forge_packing
result = measure(lambda data: forge_packing.pack_rows(data, 8192), int(sys.argv[1]))
""",
}


def measure(side: str, samples: int) -> dict[str, Any]:
    """Measure the seconds and bytes of one call, in a process of its own."""
    command = [
        sys.executable,
        "-c",
        COMMON + SIDES[side] + "print(json.dumps(result))",
        str(samples),
        str(Path(__file__).parent),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} ended with exit status {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout)


def growth(side: str, sizes: list[int], repeats: int) -> dict[str, Any]:
    """Measure seconds by number of lengths, and the growth from the smallest to the largest over that of n log n."""
    seconds = {n: statistics.median(measure(side, n)["seconds"] for _ in range(repeats)) for n in sizes}
    first, last = sizes[0], sizes[-1]
    factor = (seconds[last] / seconds[first]) / (last * math.log2(last) / (first * math.log2(first)))
    note(f"{side:10} " + ", ".join(f"{n:,}: {value:.3f} s" for n, value in seconds.items()) + f"; over n log n: {factor:.2f}")
    return {"seconds": {str(n): round(value, 5) for n, value in seconds.items()}, "over_n_log_n": round(factor, 3)}


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side")
    parser.add_argument("--toy", action="store_true", help="a thousand lengths, one process: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    samples, repeats = (1_000, 1) if options.toy else (16_384, options.repeats)
    sizes = [500, 1_000] if options.toy else [10_000, 100_000, 1_000_000, 10_000_000]
    found: dict[str, list[dict[str, Any]]] = {"forge": [], "mini_trainer": []}
    measure("forge", samples)  # compiles once for this installation
    for _ in range(repeats):
        for side, values in found.items():
            values.append(measure(side, samples))
    sides = {
        side: {"seconds": statistics.median(v["seconds"] for v in values), "bytes": max(v["bytes"] for v in values)}
        for side, values in found.items()
    }
    for side, value in sides.items():
        note(f"{side:12} {value['seconds']:8.4f} s, {value['bytes'] / 1e6:8.1f} MB")
    ours = sides["forge"]
    if not options.toy and (ours["seconds"] > 3 * BUDGET_SECONDS or ours["bytes"] > BUDGET_BYTES):
        raise SystemExit(f"the budgets of {BUDGET_SECONDS} s and {BUDGET_BYTES / 1e6:.0f} MB are missed: {ours}")
    emit(
        "packing_speed",
        f"mini-trainer's time over ours to divide {samples:,} lengths over 8 ranks; our budgets are 100 ms and 50 MB",
        sides["mini_trainer"]["seconds"] / ours["seconds"],
        20.0,
        toy=options.toy,
        at=at,
        sides=sides,
        budgets={"seconds": BUDGET_SECONDS, "bytes": BUDGET_BYTES},
        budgets_met=ours["seconds"] <= BUDGET_SECONDS and ours["bytes"] <= BUDGET_BYTES,
        growth={side: growth(side, sizes, repeats) for side in ("divide", "pack_rows")},
        sizes={"samples": samples, "ranks": 8, "max_tokens": 8192, "repeats": repeats},
    )


if __name__ == "__main__":
    main()
