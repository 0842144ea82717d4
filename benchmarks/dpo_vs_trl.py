"""Claim: on a CPU, forge's DPO (no padding, each prompt once) is faster than TRL's `DPOTrainer`, and takes less memory.

Both sides get the same model directory, the same token ids of the same pairs in the same order, a reference scored before the
measurement, AdamW (fused), clipping at 1.0, fp32, no gradient checkpointing, no logging, no saving. Each side is a process of
its own; they take turns step by step (`_lockstep.py`), and the losses of the first step must agree. Tokens are the pairs'
own, each prompt counted twice and no padding, on both sides alike; the ratio is TRL's seconds a token over forge's, each the
median over all steps after the warm-up.

    python benchmarks/dpo_vs_trl.py
    python benchmarks/dpo_vs_trl.py --model path/to/SmolLM2-135M-Instruct --adapter lora --pairs 2 --tokens 384
"""

import argparse
import tempfile
from pathlib import Path

from _beside_trl import add_chats, race_on_a_cpu, race_parser, require_trl
from _chats import Kind, chats_for
from _models import describe, model_directory
from _preferences import write_pairs
from _report import emit, machine


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = race_parser(__doc__, steps=8)
    add_chats(parser)
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of one side of a pair")
    parser.add_argument("--pairs", type=int, default=8, help="pairs of an optimizer step")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--prompts-twice", action="store_true", help="forge computes each prompt twice, as TRL does")
    return parser.parse_args()


def main() -> None:
    """Measure and print the line."""
    options = arguments()
    require_trl()
    if options.toy:
        options.model, options.tokens, options.pairs, options.steps, options.warmup = "toy-llama", 128, 2, 2, 1
    steps = options.warmup + options.steps
    at = machine()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        directory = model_directory(options.model, folder / "model")
        model = describe(directory, options.model)
        kind: Kind = options.chats
        chats = chats_for(options.model, directory, model.vocabulary, kind=kind, tokens=options.tokens, toy=options.toy)
        rows = write_pairs(folder / "rows.npz", chats, pairs=options.pairs, steps=steps, max_length=options.tokens)
        job = {
            "model": str(directory), "vocabulary": model.vocabulary, "adapter": options.adapter,
            "rows": str(folder / "rows.npz"),
            "learning_rate": options.learning_rate, "share": not options.prompts_twice,
        }  # fmt: skip
        race = race_on_a_cpu(job, folder, options, objective="_dpo")
    lengths = [length for row in range(steps) for length in rows.lengths(row)]
    emit(
        "dpo_vs_trl",
        "tokens per second of forge's DPO over TRL's DPOTrainer on the same pairs, on a CPU",
        race.ratio,
        1.5,
        toy=options.toy,
        at=at,
        **race.figures(),
        sizes={
            "model": Path(options.model).name, "adapter": options.adapter, "chats": options.chats,
            "most_tokens": options.tokens,
            "pairs": options.pairs, "tokens_mean": round(sum(lengths) / len(lengths), 1), "tokens_longest": max(lengths),
            "prompts_shared": not options.prompts_twice, "steps": options.steps, "warmup": options.warmup,
            "threads": race.threads,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
