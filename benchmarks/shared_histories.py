"""Claim: turns that are each trained in the form in which they are asked for cost about as much as one conversation.

Chat templates of reasoning models write an earlier turn otherwise than the model is asked for it, so each turn is a sample
with all that comes before it. Three sides of forge's SFT on the same made-up conversations, in processes of their own that
take turns step by step: histories in the row once (`shared`), repeated for each turn (`repeated`; the losses of the first
step must agree with those of `shared`), and one sample a conversation that learns the answers in the form of history
(`whole`). The ratio is the median over all steps of the seconds of `repeated` over `shared`; `over_whole` is that of `shared`
over `whole`.

    python benchmarks/shared_histories.py
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

SIDES = ("turns_shared", "turns_repeated", "turns_whole")


def write_conversations(
    path: Path, *, conversations: int, steps: int, turns: int, question: int, answer: int, vocabulary: int
) -> Rows:
    """Write `steps` rows of conversations: a sample for each turn, and one of the whole in the form of history.

    A turn is a question, a header of 3 tokens, an empty block of 4 that only the asked turn has, and an answer.
    """
    draw = np.random.default_rng(0)
    header, block = draw.integers(3, vocabulary, 3), draw.integers(3, vocabulary, 4)
    ids, labels = [], []
    for _ in range(conversations * steps):
        history, learned = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        for _ in range(turns):
            asked = [draw.integers(3, vocabulary, max(1, int(question * draw.lognormal(0, 0.5)))), header]
            answers = draw.integers(3, vocabulary, max(1, int(answer * draw.lognormal(0, 0.5))))
            before = np.concatenate([history, *asked])
            ids.append(np.concatenate([before, block, answers]))
            labels.append(np.concatenate([np.full(len(before) + len(block), -100), answers]))
            learned = np.concatenate([learned, np.full(len(before) - len(history), -100), answers])
            history = np.concatenate([before, answers])
        ids.append(history)
        labels.append(learned)
    return write_samples(path, ids, labels, each=(turns + 1) * conversations)


def ratio(measured: dict[str, list[dict[str, Any]]], over: str, under: str, name: str = "seconds") -> float:
    """Return the median over all steps of the ratio of two sides."""
    return statistics.median(a[name] / b[name] for a, b in zip(measured[over], measured[under], strict=True))


def main() -> None:
    """Measure and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--conversations", type=int, default=3, help="conversations of an optimizer step")
    parser.add_argument("--turns", type=int, default=6, help="turns of a conversation")
    parser.add_argument("--question", type=int, default=40, help="tokens of the middle question")
    parser.add_argument("--answer", type=int, default=60, help="tokens of the middle answer")
    parser.add_argument("--steps", type=int, default=8, help="measured steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before them that are not counted")
    parser.add_argument("--threads", type=int, default=None, help="OpenMP threads of each side (default: torch's own choice)")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    options = parser.parse_args()
    if options.toy:
        options.shape, options.conversations, options.turns, options.question, options.answer = "toy-llama", 2, 3, 5, 6
        options.steps, options.warmup = 2, 1
    steps = options.warmup + options.steps
    at = machine()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        directory = write_model(options.shape, folder / "model")
        write_conversations(
            folder / "rows.npz",
            conversations=options.conversations,
            steps=steps,
            turns=options.turns,
            question=options.question,
            answer=options.answer,
            vocabulary=SHAPES[options.shape]["vocab_size"],
        )
        job = {
            "model": str(directory), "adapter": "none", "rows": str(folder / "rows.npz"), "attention": "auto",
            "turns": options.turns, "learning_rate": 1e-6, "device": "cpu", "dtype": "float32",
        }  # fmt: skip
        figures, ends = race(job, folder, [*SIDES], steps, threads=options.threads)
    shared, repeated, whole = SIDES
    first = agree({name: figures[name] for name in (shared, repeated)}, tolerance=1e-4)
    measured = {name: done[options.warmup :] for name, done in figures.items()}
    emit(
        "shared_histories",
        "seconds of an SFT step with histories repeated for each turn over one with each in the row once, on a CPU",
        ratio(measured, repeated, shared),
        1.5,
        toy=options.toy,
        at=at,
        over_whole=round(ratio(measured, shared, whole), 3),
        cpu_time_ratio=round(ratio(measured, repeated, shared, "cpu_seconds"), 3),
        tokens={name: sum(step["tokens"] for step in done) for name, done in measured.items()},
        peak_rss_bytes={name: end["peak_rss_bytes"] for name, end in ends.items()},
        first_loss=first,
        sizes={
            "shape": options.shape, "conversations": options.conversations, "turns": options.turns,
            "question": options.question, "answer": options.answer, "steps": options.steps, "warmup": options.warmup,
            "threads": ends[shared]["threads"],
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
