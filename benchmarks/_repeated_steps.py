"""Steps of packed batches for loops compared in one process, which take turns.

They are a few rows repeated, for the loops differ, not the data.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _chats import MODULES, TOY_MODULES, make_chats, stand_in_encode, tokenize_with_stand_in
from _models import SHAPES, describe
from _rows import write_rows


def steps_parser(
    description: str | None, *, shape: str, tokens: int, micro_batches: int, steps: int, warmup: int
) -> argparse.ArgumentParser:
    """Make a parser with the options of every such comparison, and these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default=shape)
    parser.add_argument("--tokens", type=int, default=tokens, help="most tokens in a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=micro_batches, help="micro-batches in a step")
    parser.add_argument("--steps", type=int, default=steps, help="measured steps")
    parser.add_argument("--warmup", type=int, default=warmup, help="steps before them that are not counted")
    parser.add_argument("--toy", action="store_true", help="a size that runs in seconds and proves nothing")
    return parser


def steps_options(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the command line; `--toy` decides the sizes."""
    options = parser.parse_args()
    if options.toy:
        options.shape, options.tokens, options.warmup, options.steps = "toy-llama", 128, 1, 4
    return options


def sizes(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sizes that each line of such a comparison has."""
    import torch

    return {
        "shape": options.shape,
        "tokens_per_micro_batch": options.tokens,
        "micro_batches": options.micro_batches,
        "steps": options.steps,
        "warmup": options.warmup,
        "threads": torch.get_num_threads(),
    }


def repeated_steps(directory: Path, options: argparse.Namespace) -> list[list[Any]]:
    """Make the batches of each step, of rows that are written beside the model's `directory`."""
    from forge_packing import collate

    micro_batches = options.micro_batches
    encode = stand_in_encode(describe(directory, options.shape).vocabulary)
    chats = make_chats(
        lambda turns: tokenize_with_stand_in(turns, encode),
        kind="both",
        max_length=options.tokens,
        modules=TOY_MODULES if options.toy else MODULES,
    )
    rows = write_rows(directory.parent / "rows.npz", chats, options.tokens, 4 * micro_batches)
    batches = [collate(row) for row in rows.samples]
    pool = [batches[i : i + micro_batches] for i in range(0, len(batches), micro_batches)]
    return [pool[i % len(pool)] for i in range(options.warmup + options.steps)]


def load_on_cpu(directory: Path, dtype: Any) -> Any:
    """Load a model for a CPU, with the attention that forge takes there for this dtype of products, and float32 weights."""
    import torch

    from forge_accel import accelerator
    from forge_dist import load_model

    attention = accelerator("cpu").attention("auto", dtype).value
    return load_model(
        str(directory),
        dtype=torch.float32,
        device=torch.device("cpu"),
        attention=attention.name,
        attention_function=attention.function,
    )


def take_turns(
    loops: Mapping[str, Iterator[float]], steps: int, check: Callable[[int, dict[str, float]], None]
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, float]]:
    """Let loops take turns step by step, each round in the opposite order of the round before.

    Args:
        loops: side → iterator of the loss of each step.
        steps: how many.
        check: function (step, losses by side) that ends the benchmark where they are not as they must be.

    Returns:
        Each step's seconds by side, the same in CPU seconds, and the last losses.
    """
    taken: dict[str, list[float]] = {side: [] for side in loops}
    cpu: dict[str, list[float]] = {side: [] for side in loops}
    losses: dict[str, float] = {}
    for step in range(steps):
        for side in list(loops) if step % 2 == 0 else reversed(list(loops)):
            began, cpu_began = time.perf_counter(), time.process_time()
            losses[side] = next(loops[side])
            taken[side].append(time.perf_counter() - began)
            cpu[side].append(time.process_time() - cpu_began)
        check(step, losses)
    return taken, cpu, losses
