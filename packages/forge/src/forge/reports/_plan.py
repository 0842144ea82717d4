"""Batch plan → figures that a page shows: how full the micro-batches are over the run."""

from __future__ import annotations

from typing import Any, NamedTuple

import forge_packing

_MOST_STEPS, _STRETCHES, _STEPS_EACH = 128, 32, 2
"""Of a run of more steps some are measured: the first of each of 32 stretches."""
_ENDLESS = 2**10
"""Steps of an endless run that are looked at."""


class Stretch(NamedTuple):
    """Consecutive steps with the mean, lowest and highest fill of those that were measured."""

    first: int
    last: int
    fill: float
    lowest: float
    highest: float


def plan_figures(plan: forge_packing.BatchPlan, *, divided: bool = True) -> dict[str, Any]:
    """Return counts of a plan, and, if it is so `divided`, its ranks, micro-batches and fill.

    Fill is the share of all places that holds a token.
    """
    found = {
        "samples": None if plan.endless else plan.num_samples,
        "samples_in_data": len(plan.lengths),
        "tokens_in_data": int(plan.lengths.sum()),
        "steps": None if plan.endless else plan.num_steps,
        "batch_size": plan.batch_size,
    }
    if not divided:
        return found
    stretches, fill = fill_over_run(plan)
    return {
        **found,
        "ranks": plan.world_size,
        "max_tokens": plan.max_tokens,
        "fill": round(fill, 4),
        "stretches": [[first, last, *(round(share, 4) for share in fills)] for first, last, *fills in stretches],
    }


def fill_over_run(plan: forge_packing.BatchPlan) -> tuple[list[Stretch], float]:
    """Measure the fill of stretches of steps, and of all that was measured."""
    steps = _ENDLESS if plan.endless else plan.num_steps
    count, each = (steps, 1) if steps <= _MOST_STEPS else (_STRETCHES, _STEPS_EACH)
    stretches: list[Stretch] = []
    filled, micro_batches = 0.0, 0
    for number in range(count):
        first, stop = number * steps // count, (number + 1) * steps // count
        found = [plan.figures(step) for step in range(first, min(stop, first + each))]
        room = sum(step.micro_batches for step in found)
        here = sum(step.fill * step.micro_batches for step in found)
        fills = [step.fill for step in found]
        stretches.append(Stretch(first, stop - 1, here / room, min(fills), max(fills)))
        filled, micro_batches = filled + here, micro_batches + room
    return stretches, filled / micro_batches
