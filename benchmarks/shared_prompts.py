"""Claim: a preference step that computes each prompt once, for both completions, is faster than one that computes it twice.

Both sides are forge's DPO on the same pairs with the same attention, in processes of their own that take turns step by step;
the losses of the first step must agree. Pairs are made up: random tokens, lognormal lengths around `--prompt` and
`--completion` tokens. The ratio is the median over all steps of the seconds that the same step takes, twice over once;
`tokens_ratio` is its value if all of a step's cost were proportional to the tokens that go through the model. The learned
tokens go through the head once on either side.

    python benchmarks/shared_prompts.py
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from _lockstep import agree, race
from _models import SHAPES, write_model
from _report import emit, machine
from _rows import Rows, write_samples

ONCE, TWICE = "prompts_once", "prompts_twice"


def write_pairs(path: Path, *, pairs: int, steps: int, prompt: int, completion: int, vocabulary: int) -> Rows:
    """Write `steps` rows of `pairs` pairs (chosen, rejected, chosen, rejected, ...), with a common prompt in each pair."""
    draw = np.random.default_rng(0)
    ids, labels = [], []
    for _ in range(pairs * steps):
        start = draw.integers(3, vocabulary, max(1, int(prompt * draw.lognormal(0, 0.3))))
        for _ in range(2):
            own = draw.integers(3, vocabulary, max(1, int(completion * draw.lognormal(0, 0.5))))
            ids.append(np.concatenate([start, own]))
            labels.append(np.concatenate([np.full(start.size, -100), own]))
    return write_samples(path, ids, labels, each=2 * pairs)


def side(figures: list[dict[str, Any]], end: dict[str, Any]) -> dict[str, Any]:
    """Summarise one side: medians over the measured steps, its tokens in all of them, its memory."""
    return {
        "tokens_per_second": round(statistics.median(f["tokens"] / f["seconds"] for f in figures), 2),
        "seconds_per_step": round(statistics.median(f["seconds"] for f in figures), 4),
        "computed_tokens": sum(f["computed"] for f in figures),
        "peak_rss_bytes": end["peak_rss_bytes"],
        "rss_before_steps_bytes": end["rss_before_steps_bytes"],
    }


def slower(measured: dict[str, list[dict[str, Any]]], name: str) -> float:
    """Return the median over all steps of the ratio of prompts computed twice over prompts computed once."""
    return statistics.median(twice[name] / once[name] for once, twice in zip(measured[ONCE], measured[TWICE], strict=True))


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--pairs", type=int, default=4, help="pairs of an optimizer step")
    parser.add_argument("--prompt", type=int, default=200, help="tokens of the middle prompt")
    parser.add_argument("--completion", type=int, default=60, help="tokens of the middle completion")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that are not counted")
    parser.add_argument("--threads", type=int, default=None, help="OpenMP threads of each side (default: torch's own choice)")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    options = parser.parse_args()
    if options.toy:
        options.shape, options.pairs, options.prompt, options.completion = "toy-llama", 2, 20, 6
        options.steps, options.warmup = 2, 1
    steps = options.warmup + options.steps
    at = machine()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        directory = write_model(options.shape, folder / "model")
        rows = write_pairs(
            folder / "rows.npz",
            pairs=options.pairs,
            steps=steps,
            prompt=options.prompt,
            completion=options.completion,
            vocabulary=SHAPES[options.shape]["vocab_size"],
        )
        job = {
            "model": str(directory), "adapter": "none", "rows": str(folder / "rows.npz"), "attention": "auto",
            "learning_rate": 1e-6,
            "device": "cpu", "dtype": "float32",
        }  # fmt: skip
        figures, ends = race(job, folder, [ONCE, TWICE], steps, threads=options.threads)
    first = agree(figures, tolerance=1e-4)
    measured = {name: done[options.warmup :] for name, done in figures.items()}
    sides = {name: side(done, ends[name]) for name, done in measured.items()}
    once, twice = sides[ONCE], sides[TWICE]
    grown = {name: found["peak_rss_bytes"] - found["rss_before_steps_bytes"] for name, found in sides.items()}
    lengths = [length for row in range(steps) for length in rows.lengths(row)]
    emit(
        "shared_prompts",
        "seconds of a DPO step with each prompt computed twice over one with each prompt computed once, on a CPU",
        slower(measured, "seconds"),
        1.3,
        toy=options.toy,
        at=at,
        cpu_time_ratio=round(slower(measured, "cpu_seconds"), 3),
        tokens_ratio=round(twice["computed_tokens"] / once["computed_tokens"], 3),
        memory_ratio=round(twice["peak_rss_bytes"] / once["peak_rss_bytes"], 3),
        memory_of_steps_ratio=round(grown[TWICE] / grown[ONCE], 3),
        sides=sides,
        first_loss=first,
        sizes={
            "shape": options.shape, "pairs": options.pairs, "prompt": options.prompt, "completion": options.completion,
            "tokens_mean": round(sum(lengths) / len(lengths), 1), "tokens_longest": max(lengths), "steps": options.steps,
            "warmup": options.warmup, "threads": ends[ONCE]["threads"],
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
