"""Batch plan → two SVGs: the load of a step on each rank, and the fill over the run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import forge_packing
from forge._counted import counted
from forge.reports._svg import group, line, rect, svg, text

_WIDTH, _LEFT, _RIGHT = 960, 84, 24
_PLOT = _WIDTH - _LEFT - _RIGHT
_MOST_RANKS = 256
_MOST_COLUMNS = 96
# A run with more samples or steps than this is measured in stretches: fewer columns, some steps of each.
_MEASURED, _MEASURED_STEPS, _STRETCHES, _STEPS_EACH = 2**17, 2**11, 32, 16
# Steps of an endless run that are drawn.
_ENDLESS = 2**10


def draw_step(plan: forge_packing.BatchPlan, step: int) -> str:
    """Draw the micro-batches on each rank of the step at a place in the plan."""
    parts, height = _ranks(plan, step)
    name = f"Step {step + 1} on {plan.world_size} rank{'s' if plan.world_size > 1 else ''}: micro-batches, and waiting"
    return _svg(name, height, parts)


def draw_fill(plan: forge_packing.BatchPlan) -> tuple[str, str, str]:
    """Draw the fill over the run; return the drawing, its title and what it says of itself."""
    columns = _columns(plan)
    together = sum(column.filled for column in columns) / sum(column.micro_batches for column in columns)
    steps = _steps(plan)
    about = f"{steps:,} step{'s' if steps > 1 else ''}"
    if plan.endless:
        about = f"the first {about}"
    if not _whole(plan):
        about += f", measured at the first {_STEPS_EACH} of each of {len(columns)} stretches"
    if len(columns) < steps:
        about += "; strokes: emptiest to fullest step"
    title = f"Fill over the run: {together:.1%} of {plan.max_tokens:,} tokens"
    parts, height = _fill(columns, steps)
    return _svg(title, height, parts), title, about[0].upper() + about[1:] + "."


def step_words(plan: forge_packing.BatchPlan, step: int) -> tuple[str, str]:
    """Return the title of a step's drawing and what there is to see."""
    found = plan.figures(step)
    ranks = min(plan.world_size, _MOST_RANKS)
    shown = f" The first {ranks} of {plan.world_size:,} ranks are drawn." if ranks < plan.world_size else ""
    longer = found.makespan / found.least_makespan - 1
    slowest = (
        "No division of its samples would take less time."
        if longer < 0.0005
        else f"The step takes {longer:.1%} longer than the least that any division of its samples could take."
    )
    each = f"{found.micro_batches:,} micro-batch" + ("" if found.micro_batches == 1 else "es")
    return (
        f"Step {step + 1}: {counted(found.samples, 'samples')}, {counted(found.tokens, 'tokens')}",
        f"{each} on each rank (of at least {found.fewest_micro_batches:,}), "
        f"{found.fill:.1%} full. {slowest} Hatched: a rank waits for the slowest. Dashed: where the step would end at the "
        f"earliest. Point at a bar for its figures.{shown}",
    )


def _svg(name: str, height: float, parts: list[str]) -> str:
    return svg(name, _WIDTH, height, parts, hatching="stripe", more=' xmlns="http://www.w3.org/2000/svg"')


def _ranks(plan: forge_packing.BatchPlan, step: int) -> tuple[list[str], float]:
    """Draw a row for each rank: its micro-batches and its waiting, pass by pass."""
    figures = plan.figures(step)
    ranks = min(plan.world_size, _MOST_RANKS)
    rows = [plan.micro_batches(step, rank) for rank in range(plan.world_size)]
    costs = [[plan.cost_of(each) for each in row] for row in rows]
    scale = _PLOT / max(figures.makespan, figures.least_makespan)
    row_height = max(3.0, min(24.0, 420 / ranks))
    gap = 1 if row_height > 5 else 0
    parts: list[str] = []
    first = 10.0
    for rank in range(ranks):
        y, x = first + rank * row_height, 0.0
        for number in range(figures.micro_batches):
            longest, cost = max(row[number] for row in costs), costs[rank][number]
            samples = rows[rank][number]
            about = (
                f"rank {rank}, pass {number}: {counted(samples.size, 'samples')}, {plan.places(samples):,} tokens, "
                f"waits {1 - cost / longest:.0%} of the pass"
            )
            bar = _bar(x, y, cost, longest, scale, row_height - gap, "even" if number % 2 == 0 else "odd", about)
            parts.append(bar)
            x += longest + plan.cost.per_micro_batch
        if row_height >= 12 or rank == 0 or rank == ranks - 1:
            parts.append(text(_LEFT - 8, y + row_height / 2 + 4, f"rank {rank}", "soft", "end"))
    bottom = first + ranks * row_height
    bound = _LEFT + figures.least_makespan * scale
    parts.append(line(bound, first - 6, bound, bottom + 6, "bound", "no division ends earlier"))
    parts += _ticks(bottom + 4, max(figures.makespan, figures.least_makespan), scale)
    parts.append(text(_LEFT, bottom + 40, "time, as the number of tokens that take it, attention counted in", "soft"))
    return parts, bottom + 48


def _bar(x: float, y: float, cost: float, longest: float, scale: float, height: float, kind: str, about: str) -> str:
    """Draw one micro-batch, and beside it the wait for the slowest rank of its pass."""
    left, width, wait = _LEFT + x * scale, cost * scale, (longest - cost) * scale
    # A hairline of paper keeps neighbours apart.
    work = [rect(left, y, max(width - 0.7, 0.3), height, kind)] if width > 0 else []
    return group(about, [*work, *([rect(left + width, y, wait, height, "idle")] if wait > 0 else [])])


class _Column(NamedTuple):
    """Steps that share a column, with the lowest and highest fill of those that were measured."""

    first: int
    last: int
    lowest: float
    highest: float
    filled: float
    """Micro-batches that are as good as full."""
    micro_batches: int

    @property
    def fill(self) -> float:
        """Return the fill of its steps."""
        return self.filled / self.micro_batches


def _steps(plan: forge_packing.BatchPlan) -> int:
    """Return how many steps are drawn."""
    return _ENDLESS if plan.endless else plan.num_steps


def _whole(plan: forge_packing.BatchPlan) -> bool:
    """Return whether every step of the run is measured."""
    return not plan.endless and plan.num_samples <= _MEASURED and plan.num_steps <= _MEASURED_STEPS


def _columns(plan: forge_packing.BatchPlan) -> list[_Column]:
    """Divide the run into columns; of a long run only some steps of each are measured."""
    whole, steps = _whole(plan), _steps(plan)
    count = min(steps, _MOST_COLUMNS if whole else _STRETCHES)
    columns = []
    for number in range(count):
        first, stop = number * steps // count, (number + 1) * steps // count
        measured = range(first, stop if whole else min(stop, first + _STEPS_EACH))
        found = [plan.figures(step) for step in measured]
        fills = [each.fill for each in found]
        filled, micro_batches = sum(each.fill * each.micro_batches for each in found), sum(each.micro_batches for each in found)
        columns.append(_Column(first, stop - 1, min(fills), max(fills), filled, micro_batches))
    return columns


def _fill(columns: list[_Column], steps: int) -> tuple[list[str], float]:
    """Draw a bar to the mean fill of each column, and a stroke from the lowest to the highest."""
    height = 160.0
    base = 10 + height
    each = _PLOT / len(columns)
    parts: list[str] = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = base - share * height
        parts.append(line(_LEFT, y, _WIDTH - _RIGHT, y, "grid"))
        parts.append(text(_LEFT - 8, y + 4, f"{share:.0%}", "soft", "end"))
    for number, column in enumerate(columns):
        x, width = _LEFT + number * each, max(each - (1 if each > 4 else 0), 0.5)
        fill = column.fill
        first, last = column.first + 1, column.last + 1
        which = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        about = f"{which}: fill {fill:.1%}, from {column.lowest:.1%} to {column.highest:.1%}"
        tall = fill * height
        bar = [rect(x, base - tall, width, tall, "odd")]
        if column.highest > column.lowest:
            middle = x + width / 2
            bar.append(line(middle, base - column.highest * height, middle, base - column.lowest * height, "axis"))
        parts.append(group(about, bar))
    parts.append(line(_LEFT, base, _WIDTH - _RIGHT, base, "axis"))
    parts.append(text(_LEFT, base + 20, "step 1", "soft"))
    parts.append(text(_WIDTH - _RIGHT, base + 20, f"step {steps:,}", "soft", "end"))
    return parts, base + 34


def _ticks(y: float, largest: float, scale: float) -> Iterator[str]:
    """Label the axis with about five round numbers."""
    power = 10.0 ** math.floor(math.log10(largest))
    unit = next(step for step in (power / 5, power / 2, power, 2 * power, 5 * power) if largest / step <= 6)
    yield line(_LEFT, y, _LEFT + largest * scale, y, "axis")
    for number in range(int(largest / unit) + 1):
        x = _LEFT + number * unit * scale
        yield line(x, y, x, y + 5, "axis")
        yield text(x, y + 19, f"{number * unit:,.6g}", "soft", "middle")
