"""Steps of packed batches for loops compared in one process, which take turns.

They are a few rows repeated, for the loops differ, not the data.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from _chats import MODULES, TOY_MODULES, make_chats, stand_in_encode, tokenize_with_stand_in
from _models import describe
from _rows import write_rows


def repeated_steps(directory: Path, shape: str, *, tokens: int, micro_batches: int, steps: int, toy: bool) -> list[list[Any]]:
    """Make the batches of each step.

    Args:
        directory: of the model, whose vocabulary the rows are of; they are written beside it.
        shape: its name.
        tokens: most tokens of a micro-batch.
        micro_batches: of a step.
        steps: how many.
        toy: whether few chats are read.
    """
    from forge_packing import collate

    encode = stand_in_encode(describe(directory, shape).vocabulary)
    chats = make_chats(
        lambda turns: tokenize_with_stand_in(turns, encode),
        kind="both",
        max_length=tokens,
        modules=TOY_MODULES if toy else MODULES,
    )
    rows = write_rows(directory.parent / "rows.npz", chats, tokens, 4 * micro_batches)
    batches = [collate(row) for row in rows.samples]
    pool = [batches[i : i + micro_batches] for i in range(0, len(batches), micro_batches)]
    return [pool[i % len(pool)] for i in range(steps)]


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
