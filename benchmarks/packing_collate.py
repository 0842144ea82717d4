"""Claim: a micro-batch of 32k tokens is collated within 2 ms, fifty times as fast as by mini-trainer, into the same tokens.

The samples are the same on both sides, in each trainer's own form: int32 arrays, as a token store has them, and
mini-trainer's dictionaries of int64 tensors. Before anything is timed, input ids, labels and positions are compared token for
token. Both sides take turns; the ratio is mini-trainer's median over ours, the worst of three shapes of the 32k tokens.

    python benchmarks/packing_collate.py
"""

import argparse
import importlib.util
import statistics
import time
from typing import Any

import numpy as np
from _report import emit, machine, note

from forge_packing import PackedBatch, collate

BUDGET_SECONDS = 0.002
# Numbers of samples that divide the tokens: a long context, chats, one-liners.
SHAPES = (4, 64, 512)


def samples_of(tokens: int, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Draw `count` samples of uneven lengths, half of each learned; the first label is -100 on both sides."""
    draw = np.random.default_rng(0)
    cuts = np.sort(draw.choice(np.arange(1, tokens // 2), count - 1, replace=False)) * 2
    samples = []
    for size in np.diff(np.concatenate([[0], cuts, [tokens]])):
        ids = draw.integers(0, 50_000, size).astype(np.int32)
        samples.append((ids, np.where(np.arange(size) < max(size // 2, 1), -100, ids).astype(np.int32)))
    return samples


def compare(ours: PackedBatch, theirs: dict[str, Any]) -> None:
    """Compare token for token; end the benchmark where the sides differ."""
    for name in ("input_ids", "labels", "position_ids"):
        if not np.array_equal(getattr(ours, name), theirs[name][0].numpy()):
            raise SystemExit(f"the sides do not collate the same {name}")


def seconds_of(work: Any, given: Any) -> float:
    """Measure the wall-clock seconds of one call."""
    start = time.perf_counter()
    work(given)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--toy", action="store_true", help="2k tokens: seconds, and no proof")
    options = parser.parse_args()
    if importlib.util.find_spec("mini_trainer") is None:
        raise SystemExit(
            "rhai-innovation-mini-trainer is not installed here, and it is one side of this comparison: benchmarks/README.md"
        )
    import torch
    from mini_trainer.sampler import mb_collate_fn

    at = machine()
    tokens, repeats = (2048, 2) if options.toy else (32_768, options.repeats)
    ours: dict[int, float] = {}
    theirs: dict[int, float] = {}
    for count in SHAPES:
        samples = samples_of(tokens, count)
        items = [
            {
                "input_ids": torch.tensor(ids, dtype=torch.long),
                "labels": torch.tensor(labels, dtype=torch.long),
                "num_loss_counted_tokens": 1,
            }
            for ids, labels in samples
        ]
        compare(collate(samples), mb_collate_fn(items, 1))
        times: tuple[list[float], list[float]] = ([], [])
        for _ in range(repeats):
            # Several of ours for one of theirs: one takes too little time to be measured on a busy machine.
            times[0].append(statistics.median(seconds_of(collate, samples) for _ in range(20)))
            times[1].append(seconds_of(lambda given: mb_collate_fn(given, 1), items))
        ours[count], theirs[count] = statistics.median(times[0]), statistics.median(times[1])
        note(f"{count:4} samples: {1000 * ours[count]:7.3f} ms, mini-trainer {1000 * theirs[count]:8.2f} ms")
    emit(
        "packing_collate",
        f"mini-trainer's time over ours to collate {tokens:,} tokens, equal token for token; the worst of {len(SHAPES)} shapes",
        min(theirs[count] / ours[count] for count in SHAPES),
        50.0,
        toy=options.toy,
        at=at,
        milliseconds={str(count): round(1000 * value, 4) for count, value in ours.items()},
        mini_trainer_milliseconds={str(count): round(1000 * value, 3) for count, value in theirs.items()},
        budget_milliseconds=1000 * BUDGET_SECONDS,
        within_budget=None if options.toy else max(ours.values()) <= BUDGET_SECONDS,
        sizes={"tokens": tokens, "samples": list(SHAPES), "repeats": repeats},
    )


if __name__ == "__main__":
    main()
