"""Claim: on a CPU, forge's packages train faster than TRL's `SFTTrainer` with packing, and in less memory.

Both sides get the same model directory, the same tokenized chats, the same number of steps and tokens a step, assistant-only
labels, AdamW (fused) with the same learning rate and betas, gradients clipped at 1.0, fp32, no gradient checkpointing, no
logging, no saving. Each side is a process of its own; they take turns step by step (`_lockstep.py`). With `--trl rows` TRL
trains on the very rows that forge trains on, and the losses of the first step must agree; with `--trl bfd` it packs the same
chats itself, as its users do. Chats of a row that begin with the same system prompt share it on forge's side, unless
`--repeat-prefixes` is given; `shared` is the share of tokens that this saves. The ratio is TRL's seconds per real token over
forge's, each the median over all steps after the warm-up.

    python benchmarks/sft_vs_trl.py --model tiny
    python benchmarks/sft_vs_trl.py --model path/to/SmolLM2-135M-Instruct --adapter lora --tokens 1024
"""

import argparse
import tempfile
from pathlib import Path

from _beside_trl import add_chats, race_on_a_cpu, race_parser, require_trl
from _chats import behind_system_prompt, chats_for
from _models import SHAPES, describe, model_directory
from _report import emit, machine
from _rows import write_rows

TARGETS = {"tiny": 3.0}


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = race_parser(__doc__, steps=6)
    add_chats(parser)
    parser.add_argument(
        "--trl", choices=["rows", "bfd"], default="rows", help="the same packed rows, or TRL's own packing of the same chats"
    )
    parser.add_argument(
        "--tokens", type=int, default=None, help="most tokens in a row (2048 for a shape, 1024 for a directory)"
    )
    parser.add_argument("--system", type=int, default=0, help="tokens of a made-up system prompt before each chat")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument(
        "--repeat-prefixes", action="store_true", help="let forge compute what chats of a row begin with anew for each, too"
    )
    parser.add_argument("--compile", choices=["auto", "blocks", "off"], default="auto", help="forge's setting of that name")
    return parser.parse_args()


def main() -> None:
    """Measure and print the line."""
    from forge_packing import collate_shared

    options = arguments()
    require_trl()
    if options.toy:
        options.model, options.tokens, options.steps, options.warmup = "toy-llama", 128, 2, 1
    tokens = options.tokens or (2048 if options.model in SHAPES else 1024)
    steps = options.warmup + options.steps
    at = machine()
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        folder = Path(scratch)
        directory = model_directory(options.model, folder / "model")
        model = describe(directory, options.model)
        chats = chats_for(
            options.model, directory, model.vocabulary, kind=options.chats, tokens=tokens - options.system, toy=options.toy
        )
        chats = behind_system_prompt(chats, options.system, model.vocabulary)
        rows = write_rows(folder / "rows.npz", chats, tokens, steps)
        job = {
            "model": str(directory), "vocabulary": model.vocabulary, "adapter": options.adapter,
            "rows": str(folder / "rows.npz"),
            "tokens": tokens, "trl_packing": options.trl, "learning_rate": options.learning_rate,
            "share": not options.repeat_prefixes, "compile": options.compile,
        }  # fmt: skip
        # TRL's own rows are different, and so are their losses.
        tolerance = 1e-4 if options.trl == "rows" else float("inf")
        done = race_on_a_cpu(job, folder, options, tolerance=tolerance)
    saved = 1 - sum(len(collate_shared(row).input_ids) for row in rows.samples) / sum(rows.tokens(i) for i in range(steps))
    labelled = sum(rows.labelled(i) for i in range(steps)) / sum(rows.tokens(i) for i in range(steps))
    emit(
        "sft_vs_trl",
        "tokens per second of forge's pieces over TRL's SFTTrainer with packing, on a CPU",
        done.ratio,
        TARGETS.get(options.model, 1.4),
        toy=options.toy,
        at=at,
        **done.figures(),
        sizes={
            "model": Path(options.model).name, "adapter": options.adapter, "trl_packing": options.trl,
            "chats": options.chats, "tokens_per_row": tokens, "system": options.system,
            "tokens_mean": round(sum(rows.tokens(i) for i in range(steps)) / steps, 1),
            "chats_per_row": round(sum(len(rows.lengths(i)) for i in range(steps)) / steps, 1),
            "labelled_share": round(labelled, 4), "shared": 0.0 if options.repeat_prefixes else round(saved, 4),
            "steps": options.steps, "warmup": options.warmup, "threads": done.threads,
            "compile": options.compile,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
