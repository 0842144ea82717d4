"""Claim: a store is read at a million samples a second or more, by index, in any order, in plain Python.

A store of 200,000 samples of 20 to 400 tokens; `store[i].input_ids` for every i of a random order, several times over. The
ratio is the samples a second over a million. Labels, segments and roles are computed when they are read; their cost is
measured too.

    python benchmarks/data_store.py
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from _report import emit, machine, note

import forge_data

GOAL_PER_SECOND = 1_000_000


def write_rows(path: Path, count: int) -> None:
    """Write rows of tokens in mini-trainer's format."""
    draw = random.Random(0)
    with path.open("w", encoding="ascii") as file:
        for _ in range(count):
            ids = [draw.randrange(50_000) for _ in range(draw.randint(20, 400))]
            labels = [-100] * (len(ids) // 2) + ids[len(ids) // 2 :]
            file.write(json.dumps({"input_ids": ids, "labels": labels, "len": len(ids)}) + "\n")


def per_second(read: Callable[[int], object], order: list[int], repeats: int) -> float:
    """Measure the calls of `read` a second over all indices, the median of the rounds."""
    rates = []
    for _ in range(repeats):
        start = time.perf_counter()
        for index in order:
            read(index)
        rates.append(len(order) / (time.perf_counter() - start))
    return statistics.median(rates)


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--toy", action="store_true", help="a small store: seconds, and no proof")
    options = parser.parse_args()
    at = machine()
    count, repeats = (500, 2) if options.toy else (options.samples, options.repeats)
    with tempfile.TemporaryDirectory() as scratch:
        write_rows(Path(scratch) / "rows.jsonl", count)
        store = forge_data.TokenStore.from_jsonl(Path(scratch) / "rows.jsonl", Path(scratch) / "store")
        order = list(range(count))
        random.Random(1).shuffle(order)
        view = store.select(order)
        rates = {
            "input_ids": per_second(lambda index: store[index].input_ids, order, repeats),
            "input_ids of a view": per_second(lambda index: view[index].input_ids, order, repeats),
            "input_ids and labels": per_second(lambda index: (store[index].input_ids, store[index].labels), order, repeats),
        }
        tokens = int(store.lengths.sum())
    for name, rate in rates.items():
        note(f"{name:24} {rate:12,.0f} samples/s")
    emit(
        "data_store",
        "samples a second by index over a million",
        rates["input_ids"] / GOAL_PER_SECOND,
        1.0,
        toy=options.toy,
        at=at,
        samples_per_second={name: round(rate) for name, rate in rates.items()},
        sizes={"samples": count, "tokens": tokens, "repeats": repeats},
    )


if __name__ == "__main__":
    main()
