"""Claim: with a quarter of the tokens learned and a vocabulary of 49,152, forge trains 1.5 times as fast as TRL on a CPU.

The chats of `sft_vs_trl.py`, of which only the last quarter of each is learned (long questions with short answers); the same
rows, losses of the first step that agree, turns step by step. Logits and their gradients are most of a small model's work
with such a vocabulary, and forge makes them of learned positions alone. The ratio is TRL's seconds per token over forge's,
each the median over the steps after the warm-up.

    python benchmarks/sft_few_labels_vs_trl.py
"""

import tempfile
from pathlib import Path

import numpy as np
from _beside_trl import race_on_a_cpu, race_parser, require_trl
from _chats import Chats, chats_for
from _models import SHAPES, describe, write_model
from _report import emit, machine
from _rows import write_rows

TARGET = 1.5


def last_quarters(chats: Chats) -> Chats:
    """Relabel chats so that only the last quarter of each one's tokens is learned."""
    ends = np.cumsum(chats.lengths)
    from_end = np.repeat(ends, chats.lengths) - np.arange(len(chats.input_ids))
    learned = from_end <= np.repeat((chats.lengths + 2) // 4, chats.lengths)
    return chats._replace(labels=np.where(learned, chats.input_ids, -100).astype(chats.labels.dtype))


def main() -> None:
    """Measure and print the line."""
    parser = race_parser(__doc__, steps=6)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--tokens", type=int, default=2048, help="most tokens in a row")
    options = parser.parse_args()
    require_trl()
    if options.toy:
        options.shape, options.tokens, options.steps, options.warmup = "toy-llama", 128, 2, 1
    steps = options.warmup + options.steps
    at = machine()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        directory = write_model(options.shape, folder / "model")
        model = describe(directory, options.shape)
        chats = chats_for(options.shape, directory, model.vocabulary, kind="both", tokens=options.tokens, toy=options.toy)
        rows = write_rows(folder / "rows.npz", last_quarters(chats), options.tokens, steps)
        job = {
            "model": str(directory), "vocabulary": model.vocabulary, "adapter": "none", "rows": str(folder / "rows.npz"),
            "tokens": options.tokens, "trl_packing": "rows", "learning_rate": 1e-5,
        }  # fmt: skip
        done = race_on_a_cpu(job, folder, options)
    tokens = sum(rows.tokens(i) for i in range(steps))
    emit(
        "sft_few_labels_vs_trl",
        "tokens per second of forge's pieces over TRL's SFTTrainer where a quarter of the tokens is learned, on a CPU",
        done.ratio,
        TARGET,
        toy=options.toy,
        at=at,
        **done.figures(),
        sizes={
            "model": options.shape,
            "vocabulary": model.vocabulary,
            "tokens_per_row": options.tokens,
            "tokens_mean": round(tokens / steps, 1),
            "labelled_share": round(sum(rows.labelled(i) for i in range(steps)) / tokens, 4),
            "steps": options.steps,
            "warmup": options.warmup,
            "threads": done.threads,
        },
    )


if __name__ == "__main__":
    main()
