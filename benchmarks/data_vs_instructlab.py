"""Claim: `forge_data.prepare` is at least 5 times as fast as instructlab's `process_data`, with the same ids and labels.

3,000 conversations of one to three questions and answers, one process a side: ours with its defaults, in which the tokenizer
has its threads, and once more in one thread (`num_proc=1`); the target is for the first, which is what a user gets. Each side
reads a JSONL file and a tokenizer's directory and writes the file that it trains from: ours a token store with its lint,
theirs `data.jsonl`. They take turns in one process with all libraries loaded; every run gets a new copy of the file, so that
no side profits from datasets' cache. Every id and every label must be the same. The ratio is their seconds over ours,
medians; the processor time of both is beside it.

    python benchmarks/data_vs_instructlab.py
"""

import argparse
import importlib.util
import json
import tempfile
from pathlib import Path

import _preparation as preparation
from _report import emit, machine

TARGET = 5.0


def instructlab(data: Path, tokenizer: Path, folder: Path) -> None:
    """Prepare as instructlab's `run_training` does before it trains."""
    from instructlab.training.data_process import process_data

    process_data(
        data_path=str(data),
        data_output_path=str(folder / "out"),
        max_seq_len=1_000_000,
        model_path=str(tokenizer),
        num_cpu_procs=1,
    )


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3000, help="conversations")
    parser.add_argument("--repeats", type=int, default=5, help="measured runs of each side")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    options = parser.parse_args()
    if importlib.util.find_spec("instructlab") is None:
        raise SystemExit(
            "instructlab-training is not installed here, and it is one side of this comparison: benchmarks/README.md"
        )
    if options.toy:
        options.rows, options.repeats, options.vocabulary = 40, 1, 500
    at = machine()
    rows = preparation.make_rows(options.rows, toy=options.toy)
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        tokenizer = preparation.write_tokenizer(folder / "tokenizer", rows, preparation.CHATML, vocabulary=options.vocabulary)
        file = folder / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        sides = {"forge": preparation.forge, "forge_one_thread": preparation.forge_in_one, "instructlab": instructlab}
        every = preparation.take_turns(sides, file, tokenizer, folder, repeats=options.repeats)
        theirs = list(preparation.read_rows(folder / "instructlab-0" / "out" / "data.jsonl"))
        for ours in ("forge-0", "forge_one_thread-0"):
            sizes = preparation.agree(preparation.forge_wrote(folder / ours), theirs, "instructlab")
    measured = {side: preparation.summary(taken, sizes["tokens"]) for side, taken in every.items()}
    emit(
        "data_vs_instructlab",
        "instructlab-training's process_data's seconds over forge_data.prepare's, one process each, same ids and labels",
        measured["instructlab"]["seconds"] / measured["forge"]["seconds"],
        TARGET,
        toy=options.toy,
        at=at,
        **preparation.ratios(measured, "instructlab"),
        sides=measured,
        sizes={
            **sizes,
            "bytes": sum(len(json.dumps(row)) + 1 for row in rows),
            "vocabulary": options.vocabulary,
            "repeats": options.repeats,
        },
    )


if __name__ == "__main__":
    main()
