"""Claim: with dtype=bfloat16 a CPU that multiplies in bfloat16 trains a SmolLM2 shape at least 2.5 times as fast as in float32.

Both sides train a copy of one model on the same packed batches by `forge_algos.train`, with float32 weights, and the attention
and autocast that `forge_accel` gives for the dtype on this processor. They take turns step by step in one process, each round
in the opposite order of the round before. The ratio is the median over all rounds of float32's seconds over bfloat16's.

`products` says what of that the processor allows: the same ratio for the matrix products of a step alone, which its layers and
its head make forward and backward, and `bound`: float32's step over the time that bfloat16's products alone take.

    python benchmarks/bfloat16_cpu.py --steps 10
"""

import copy
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from _models import write_model
from _repeated_steps import load_on_cpu, repeated_steps, sizes, steps_options, steps_parser, take_turns
from _report import emit, machine, note

SIDES = ("float32", "bfloat16")


def products(model: Any, lengths: list[int], learned: list[int], dtype: Any) -> float:
    """Return the seconds that a step's matrix products take: each layer's and the head's, forward and twice backward.

    Args:
        model: whose linear layers are multiplied.
        lengths: tokens of each micro-batch.
        learned: tokens of each micro-batch that the head scores.
        dtype: of both factors.
    """
    import torch

    top = model.get_output_embeddings()
    shapes = Counter(
        (rows, *module.weight.shape)
        for length, scored in zip(lengths, learned, strict=True)
        for module in model.modules()
        if isinstance(module, torch.nn.Linear)
        for rows in [scored if module is top else length]
    )
    taken = 0.0
    for (rows, outputs, inputs), count in shapes.items():
        x, weight, gradient = (torch.randn(*shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (rows, outputs)))

        def once(x: Any = x, weight: Any = weight, gradient: Any = gradient) -> float:
            began = time.perf_counter()
            x @ weight.T
            gradient @ weight
            gradient.T @ x
            return time.perf_counter() - began

        once()
        taken += count * statistics.median(once() for _ in range(5))
    return taken


def main() -> None:
    """Measure and print the line."""
    parser = steps_parser(__doc__, shape="smollm2-135m", tokens=2048, micro_batches=1, steps=10, warmup=2)
    parser.add_argument("--compile", action="store_true", help="both sides with compile=blocks")
    options = steps_options(parser)
    at = machine()

    import torch

    from forge_accel import CompiledBlocks, accelerator
    from forge_algos import SFT, OptimizerSettings, adamw, repeated_blocks, schedule, train

    found = accelerator("cpu")
    settings = OptimizerSettings(learning_rate=1e-5, lr_scheduler="cosine", warmup_steps=2, max_grad_norm=1.0)
    with tempfile.TemporaryDirectory(prefix="forge-bench-") as scratch:
        directory = write_model(options.shape, Path(scratch) / "model")
        steps = repeated_steps(directory, options)
        loops: dict[str, Iterator[float]] = {}
        models: dict[str, Any] = {}
        for side in SIDES:
            dtype = found.dtype(side).value
            model = load_on_cpu(directory, dtype)
            models[side] = copy.deepcopy(model)
            if options.compile:
                CompiledBlocks(repeated_blocks(model), note=note)
            optimizer = adamw(model, settings, fused=found.fused_optimizer.value)
            outputs = train(
                model,
                steps,
                objective=SFT(),
                optimizer=optimizer,
                scheduler=schedule(optimizer, settings, num_steps=len(steps)),
                max_grad_norm=1.0,
                device=found.device.value,
                autocast=partial(found.autocast, dtype),
                keep_casts=True,
            )
            loops[side] = (output.loss for output in outputs)

    def same(step: int, losses: dict[str, float]) -> None:
        if abs(losses["bfloat16"] - losses["float32"]) > 0.02 * abs(losses["float32"]):
            raise SystemExit(f"step {step + 1}: the sides do not train the same thing: losses {losses}")

    taken, _, losses = take_turns(loops, len(steps), same)
    seconds = {side: times[options.warmup :] for side, times in taken.items()}
    lengths = [len(batch.input_ids) for batch in steps[-1]]
    learned = [int((batch.labels != -100).sum()) for batch in steps[-1]]
    alone = {side: products(models[side], lengths, learned, getattr(torch, side)) for side in SIDES}
    tokens_of = [sum(len(batch.input_ids) for batch in micro_batches) for micro_batches in steps][options.warmup :]
    note(f"loss after {len(steps)} steps: {losses}")
    emit(
        "bfloat16_cpu",
        "tokens per second of forge_algos.train with dtype=bfloat16 over those with float32",
        statistics.median(slow / fast for slow, fast in zip(*(seconds[side] for side in SIDES), strict=True)),
        2.5,
        toy=options.toy,
        at=at,
        products=round(alone["float32"] / alone["bfloat16"], 3),
        bound=round(statistics.median(seconds["float32"]) / alone["bfloat16"], 3),
        sides={
            side: {
                "tokens_per_second": round(statistics.median(t / s for t, s in zip(tokens_of, seconds[side], strict=True)), 1),
                "seconds_per_step": round(statistics.median(seconds[side]), 4),
                "products_seconds": round(alone[side], 4),
            }
            for side in SIDES
        },
        final_loss=losses,
        sizes={**sizes(options), "compile": options.compile},
    )


if __name__ == "__main__":
    main()
