"""Claim: forge trains a model that would mix packed samples at least as fast as TRL trains it with padding, on a CPU.

Mamba 2 carries one sample of a row into the next, so forge runs samples alone, in forwards of similar lengths without padding
masks; TRL pads the same samples to the longest of the batch. gpt-oss builds its mask without positions: forge's attention keeps
its samples apart in one row. The same batches of chats, losses of the first step that agree, turns step by step. The ratio is
TRL's seconds per token over forge's, each the median over the steps after the warm-up.

    python benchmarks/alone_vs_trl.py --shape mamba2-small
    python benchmarks/alone_vs_trl.py --shape gpt-oss-small
"""

import tempfile
from pathlib import Path

from _beside_trl import race_on_a_cpu, race_parser, require_trl
from _chats import chats_for
from _models import SHAPES, write_model
from _report import emit, machine
from _rows import write_batches

TARGET = 1.0


def main() -> None:
    """Measure and print the line."""
    parser = race_parser(__doc__, steps=8)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="mamba2-small")
    parser.add_argument("--samples", type=int, default=8, help="chats in a step")
    parser.add_argument("--tokens", type=int, default=512, help="most tokens in a chat")
    options = parser.parse_args()
    require_trl()
    if options.toy:
        options.shape, options.tokens, options.samples, options.steps, options.warmup = "toy-mamba2", 64, 3, 2, 1
    steps = options.warmup + options.steps
    at = machine()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        directory = write_model(options.shape, folder / "model")
        vocabulary = SHAPES[options.shape]["vocab_size"]
        chats = chats_for(options.shape, directory, vocabulary, kind="both", tokens=options.tokens, toy=options.toy)
        rows = write_batches(folder / "rows.npz", chats, options.samples, steps)
        job = {
            "model": str(directory), "vocabulary": vocabulary, "adapter": "none", "rows": str(folder / "rows.npz"),
            "tokens": options.tokens, "trl_packing": "padded", "learning_rate": 1e-5,
        }  # fmt: skip
        done = race_on_a_cpu(job, folder, options, trl_attention="eager")
    lengths = [rows.lengths(step) for step in range(steps)]
    tokens = sum(map(sum, lengths))
    emit(
        "alone_vs_trl",
        "tokens per second of forge's pieces over TRL's SFTTrainer with padding, for a model that would mix packed samples",
        done.ratio,
        TARGET,
        toy=options.toy,
        at=at,
        **done.figures(),
        sizes={
            "model": options.shape,
            "vocabulary": vocabulary,
            "samples": options.samples,
            "tokens_mean": round(tokens / steps, 1),
            "places_a_token_with_padding": round(sum(max(step) * len(step) for step in lengths) / tokens, 3),
            "steps": options.steps,
            "warmup": options.warmup,
            "threads": done.threads,
        },
    )


if __name__ == "__main__":
    main()
