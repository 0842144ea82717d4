"""Claim: preparing a million rows takes less than 1 GB of memory, in one process, and in two workers and the one that writes.

Each run is a process of its own; its peak is the kernel's VmHWM, libraries included. For workers the largest one's peak
counts for each. The ratio is the budget over the worse of the two runs. A second file, a tenth as long, shows how much of it
grows with the rows.

    python benchmarks/data_memory.py
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from _data_files import file_of_rows, tokenizer_directory
from _report import emit, machine, note

BUDGET_BYTES = 1_000_000_000
SCRIPT = """
import json, resource, sys
import forge_data
store = forge_data.prepare(*sys.argv[1:4], num_proc=int(sys.argv[4]), progress=False)
own, workers = (resource.getrusage(who).ru_maxrss * 1024 for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
print(json.dumps({"own": own, "worker": workers, "rows": store.accounting.read}))
"""


def peak(data: Path, tokenizer: Path, store: Path, processes: int) -> dict[str, int]:
    """Measure the peak bytes of a preparation: the process that writes, the largest worker, all together."""
    command = [sys.executable, "-c", SCRIPT, str(data), str(tokenizer), str(store), str(processes)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ended with exit status {done.returncode}:\n{done.stderr}")
    found = json.loads(done.stdout)
    together = found["own"] + (found["worker"] * processes if processes > 1 else 0)
    note(f"{found['rows']:,} rows, {processes} process(es): {together / 1e6:,.0f} MB")
    return {"writing": found["own"], "largest_worker": found["worker"], "together": together}


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--toy", action="store_true", help="a few rows: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    rows = 500 if options.toy else options.rows
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = tokenizer_directory(folder, toy=options.toy)
        data = file_of_rows(folder / "train.jsonl", rows, toy=options.toy)
        few = file_of_rows(folder / "few.jsonl", rows // 10, toy=options.toy)
        one = peak(data, tokenizer, folder / "one", 1)
        tenth = peak(few, tokenizer, folder / "tenth", 1)
        two = peak(data, tokenizer, folder / "two", 2)
        size = data.stat().st_size
    emit(
        "data_memory",
        "budget over peak memory: 1 GB for a million rows, in one process and in three together",
        BUDGET_BYTES / max(one["together"], two["together"]),
        1.0,
        toy=options.toy or options.rows < 1_000_000,
        at=at,
        peak_rss_bytes={"one process": one, "two workers": two, "one process, a tenth of the rows": tenth},
        budget_bytes=BUDGET_BYTES,
        sizes={"rows": rows, "bytes": size},
    )


if __name__ == "__main__":
    main()
