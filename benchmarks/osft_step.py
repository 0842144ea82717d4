"""Claim: a training step with OSFT takes at most 1.15 times that of full fine-tuning, on a CPU.

Both sides train a copy of one model on the same packed batches by `forge_algos.train`, with AdamW, clipping and schedule: one
fully, the other with the default OSFT, a share of each layer's directions free. They take turns step by step in one process,
each round in the opposite order of the round before. The ratio is 1.15 over the median over all rounds of OSFT's seconds over
full fine-tuning's. `osft_cost.py` measures single layers.

    python benchmarks/osft_step.py --ratio 0.25
"""

import copy
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from _models import write_model
from _repeated_steps import load_on_cpu, repeated_steps, sizes, steps_options, steps_parser, take_turns
from _report import emit, machine, note

LIMIT = 1.15


def main() -> None:
    """Measure and print the line."""
    parser = steps_parser(__doc__, shape="smollm2-135m", tokens=2048, micro_batches=1, steps=10, warmup=2)
    parser.add_argument("--ratio", type=float, default=0.25, help="unfreeze_rank_ratio")
    options = steps_options(parser)
    at = machine()

    import torch

    from forge_accel import accelerator
    from forge_algos import SFT, AdapterSettings, OptimizerSettings, adamw, adapt, schedule, train

    found = accelerator("cpu")
    settings = OptimizerSettings(learning_rate=1e-5, lr_scheduler="cosine", warmup_steps=2, max_grad_norm=1.0)
    adapters = {"full": AdapterSettings(), "osft": AdapterSettings(adapter="osft", unfreeze_rank_ratio=options.ratio)}
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        directory = write_model(options.shape, Path(scratch) / "model")
        steps = repeated_steps(directory, options)
        model = load_on_cpu(directory, torch.float32)
    loops: dict[str, Iterator[float]] = {}
    trained: dict[str, int] = {}
    began = time.perf_counter()
    for side, adapter in adapters.items():
        adaptation = adapt(copy.deepcopy(model), adapter)
        trained[side] = sum(p.numel() for p in adaptation.model.parameters() if p.requires_grad)
        optimizer = adamw(adaptation.model, settings, fused=found.fused_optimizer.value)
        outputs = train(
            adaptation.model,
            steps,
            objective=SFT(),
            optimizer=optimizer,
            scheduler=schedule(optimizer, settings, num_steps=len(steps)),
            max_grad_norm=1.0,
            device=found.device.value,
            adaptation=adaptation,
        )
        loops[side] = (output.loss for output in outputs)
    divided = time.perf_counter() - began

    def same(step: int, losses: dict[str, float]) -> None:
        if step == 0 and abs(losses["full"] - losses["osft"]) > 1e-4 * abs(losses["full"]):
            raise SystemExit(f"the sides do not begin as the same model: losses {losses}")

    taken, _, losses = take_turns(loops, len(steps), same)
    seconds = {side: times[options.warmup :] for side, times in taken.items()}
    over = statistics.median(osft / full for osft, full in zip(seconds["osft"], seconds["full"], strict=True))
    note(f"OSFT over full fine-tuning: {over:.3f}; losses {losses}")
    emit(
        "osft_step",
        "1.15 over a step of OSFT as a share of full fine-tuning's",
        LIMIT / over,
        1.0,
        toy=options.toy,
        at=at,
        over_full=round(over, 4),
        seconds_per_step={side: round(statistics.median(times), 4) for side, times in seconds.items()},
        dividing_seconds=round(divided, 1),
        trainable=trained,
        sizes={**sizes(options), "unfreeze_rank_ratio": options.ratio},
    )


if __name__ == "__main__":
    main()
