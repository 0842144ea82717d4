"""Claim: on a CPU, forge's GRPO (no padding, each prompt once) is faster than TRL's `GRPOTrainer`, and takes less memory.

Both sides get the same model directory and the same recorded completions and rewards of the same prompts, so that sampling is
no part of it: what is timed is scoring a rollout, advantages, and an update. AdamW (fused), clipping at 1.0, fp32, no gradient
checkpointing, no logging, no saving, no reference. forge scores each rollout with the policy before it trains (it promises a
first ratio of 1); TRL leaves that out where there is one update a rollout. Each side is a process of its own; they take turns
step by step (`_lockstep.py`), and the losses of the first step must agree. Tokens are those of prompts and completions, each
prompt counted once a completion and no padding, on both sides alike; the ratio is TRL's seconds a token over forge's, each the
median over all steps after the warm-up.

    python benchmarks/grpo_vs_trl.py
    python benchmarks/grpo_vs_trl.py --model path/to/SmolLM2-135M-Instruct --adapter lora --prompts 1 --tokens 384
"""

import argparse
import tempfile
from pathlib import Path

from _beside_trl import add_chats, race_on_a_cpu, race_parser, require_trl
from _chats import Kind, chats_for
from _models import describe, model_directory
from _preferences import write_groups
from _report import emit, machine


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = race_parser(__doc__, steps=8)
    add_chats(parser)
    parser.add_argument("--tokens", type=int, default=1024, help="most tokens of a prompt and a completion")
    parser.add_argument("--prompts", type=int, default=2, help="prompts of an optimizer step")
    parser.add_argument("--each", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    return parser.parse_args()


def main() -> None:
    """Measure and print the line."""
    options = arguments()
    require_trl()
    if options.toy:
        options.model, options.tokens, options.prompts, options.each = "toy-llama", 128, 2, 2
        options.steps, options.warmup = 2, 1
    steps = options.warmup + options.steps
    at = machine()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        directory = model_directory(options.model, folder / "model")
        model = describe(directory, options.model)
        kind: Kind = options.chats
        chats = chats_for(options.model, directory, model.vocabulary, kind=kind, tokens=options.tokens, toy=options.toy)
        rows = write_groups(
            folder / "rows.npz", chats, prompts=options.prompts, each=options.each, steps=steps, max_length=options.tokens
        )
        job = {
            "model": str(directory), "vocabulary": model.vocabulary, "adapter": options.adapter,
            "rows": str(folder / "rows.npz"),
            "learning_rate": options.learning_rate, "each": options.each, "tokens": options.tokens,
            "row_tokens": 8 * options.tokens,
        }  # fmt: skip
        race = race_on_a_cpu(job, folder, options, objective="_grpo")
    lengths = [length for row in range(steps) for length in rows.lengths(row)]
    emit(
        "grpo_vs_trl",
        "tokens per second of forge's GRPO over TRL's GRPOTrainer on the same prompts and completions, on a CPU",
        race.ratio,
        2.0,
        toy=options.toy,
        at=at,
        **race.figures(),
        sizes={
            "model": Path(options.model).name, "adapter": options.adapter, "chats": options.chats,
            "most_tokens": options.tokens,
            "prompts": options.prompts, "each": options.each,
            "tokens_mean": round(sum(lengths) / len(lengths), 1), "tokens_longest": max(lengths),
            "steps": options.steps, "warmup": options.warmup,
            "threads": race.threads,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
