"""Claim: two processes prepare a 200 MB file at least 1.6 times as fast as one, and write the same bytes.

Both in turn, A B, B A, ..., each into a store of its own, starting the workers included. The stores must be the same, file by
file.

    python benchmarks/data_workers.py --repeats 3
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from _data_files import file_of_bytes, tokenizer_directory
from _report import emit, machine, note

import forge_data


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=200.0)
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--toy", action="store_true", help="a small file once: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    size = int(2e5 if options.toy else options.megabytes * 1e6)
    seconds: dict[int, list[float]] = {1: [], options.processes: []}
    stores: dict[int, forge_data.TokenStore] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tokenizer = tokenizer_directory(folder, toy=options.toy)
        data = file_of_bytes(folder / "train.jsonl", size, toy=options.toy)
        for turn in range(1 if options.toy else options.repeats):
            for count in sorted(seconds, reverse=turn % 2 == 1):
                start = time.perf_counter()
                # A directory for each run: a store that exists would be reused.
                stores[count] = forge_data.prepare(
                    data, str(tokenizer), folder / f"{count}-{turn}", num_proc=count, progress=False
                )
                seconds[count].append(time.perf_counter() - start)
                note(f"{count} process{'es' if count > 1 else ''}: {seconds[count][-1]:.1f} s")
        one, several = (stores[count] for count in seconds)
        if one.sha256 != several.sha256:
            raise SystemExit("the stores differ: they do not prepare the same")
        tokens, rows = int(one.lengths.sum()), one.accounting.read
    median = {count: statistics.median(times) for count, times in seconds.items()}
    emit(
        "data_workers",
        f"seconds of one process over those of {options.processes}, on one file",
        median[1] / median[options.processes],
        1.6,
        toy=options.toy or options.megabytes < 200,
        at=at,
        seconds={str(count): round(value, 2) for count, value in median.items()},
        tokens_per_second={str(count): round(tokens / value) for count, value in median.items()},
        megabytes_per_second={str(count): round(size / 1e6 / value, 2) for count, value in median.items()},
        sizes={"bytes": size, "rows": rows, "tokens": tokens, "repeats": len(seconds[1])},
    )


if __name__ == "__main__":
    main()
