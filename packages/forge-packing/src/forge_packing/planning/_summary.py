"""Summary of a plan: a few lines that a person reads before the run."""

import attrs
import numpy as np

from forge_packing._checks import Int64Array
from forge_packing._counted import counted
from forge_packing.ordering._mixture import drawn
from forge_packing.ordering._order import Order
from forge_packing.planning._figures import BlockFigures, block_figures, concatenate
from forge_packing.planning._steps import Steps

MEASURED_SAMPLES, MEASURED_STEPS, STRETCHES = 2**14 - 1, 2**10, 8
"""Most samples, most steps and stretches of steps that are measured, from the first step to the last, of a longer run.

So few samples are divided before compiled code is asked for, and the bounds of so many steps take under a second.
"""

MOST_SOURCES = 8
"""Sources of a mixture that are listed."""


def summarise(steps: Steps, loss_counts: Int64Array | None, items: str, *, divided: bool = True) -> str:
    """Return the lines of a summary, without a final line end.

    Fill is the share of all micro-batches' budgets, empty ones included, that holds a token. What samples share, in a plan
    that gives it room once, is said beside the plan without that. Ranks wait, pass by pass, for the
    slowest of them; what a better division could save is an upper bound.
    """
    order, samples = steps.order, steps.lengths.size
    most = max(1, min(MEASURED_STEPS, MEASURED_SAMPLES // min(order.batch_size, samples)))
    stretches = steps.sampled_stretches(most, STRETCHES)
    parts = [block_figures(steps, loss_counts, steps.stretch(first, stop), 0, stop - first) for first, stop in stretches]
    found = concatenate(parts)
    measured = found.tokens.size
    most_items = counted(order.batch_size, items)
    shuffled = f"shuffled by seed {order.seed}" if order.shuffle else "in the order of the data"
    if order.num_steps is None:
        lines = [
            f"{items:<15}{samples:,} in the data, {shuffled}",
            f"steps          without end, of at most {most_items}",
        ]
    else:
        run = _epochs(order.num_steps, order.steps_per_epoch)
        lines = [
            f"{items:<15}{order.position(order.num_steps):,} ({samples:,} in the data), {shuffled}",
            f"steps          {order.num_steps:,} of at most {most_items}, {run}",
        ]
    if order.shares is not None:
        lines += _sources(order, order.shares, items)
    if order.num_steps is None or measured < order.num_steps:
        if len(stretches) == 1:
            lines.append(f"measured       the first {'step' if measured == 1 else counted(measured, 'steps')}:")
        else:
            lines.append(f"measured       {measured:,} steps, in {len(stretches)} stretches from the first to the last:")
    lines += _measured(found)
    shares = steps.prefixes is not None or steps.repeated is not None
    if divided and shares and (found.filled != found.tokens).any():
        alone = attrs.evolve(steps, prefixes=None, repeated=None)
        without = sum(int(alone.stretch(first, stop).pass_starts[-1]) for first, stop in stretches)
        lines.append(
            f"shared tokens  computed once a micro-batch: {found.filled.sum():,} tokens in place of {found.tokens.sum():,}; "
            f"{counted(without, 'micro-batches')} without that"
        )
    return "\n".join([*lines, *(_division(steps, found) if divided else ())])


def _sources(order: Order, shares: Int64Array, items: str) -> list[str]:
    """Return a mixture's lines: shares, draws of each source, and sources never drawn."""
    more = f" and {shares.size - MOST_SOURCES} more" if shares.size > MOST_SOURCES else ""
    shown = ", ".join(f"{share:.4g}" for share in (shares / shares.sum())[:MOST_SOURCES].tolist())
    lines = [f"sources        {shares.size:,}, with shares {shown}{more}"]
    if order.num_steps is None:
        return lines
    counts = drawn(shares, order.position(order.num_steps))
    lines.append(f"drawn          {', '.join(f'{count:,}' for count in counts[:MOST_SOURCES].tolist())}{more} {items}")
    if never := (np.flatnonzero(counts == 0) + 1).tolist():
        listed, others = ", ".join(map(str, never[:MOST_SOURCES])), " and others" if len(never) > MOST_SOURCES else ""
        lines.append(f"never drawn    source {listed}{others}: too small a share of so few {items}")
    return lines


def _measured(found: BlockFigures) -> list[str]:
    lines = [f"tokens         {found.tokens.sum():,}, a step {_range(found.tokens)}"]
    if found.loss_tokens is not None:
        none = int((found.loss_tokens == 0).sum())
        line = f"loss tokens    {found.loss_tokens.sum():,}, a step {_range(found.loss_tokens)}"
        lines.append(line + (f"; steps with none: {none:,}" if none else ""))
    return lines


def _range(values: Int64Array) -> str:
    """Return the lowest and the highest number, `640 to 1,090`, or the one that all are."""
    low, high = int(values.min()), int(values.max())
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _epochs(num_steps: int, steps_per_epoch: int) -> str:
    """Return the number of epochs in words; a part is never rounded to a whole one.

    >>> [_epochs(steps, 2000) for steps in (1340, 1999, 2000, 2001, 2020, 3999, 6000)]
    ['0.67 of an epoch', '0.99 of an epoch', '1 epoch', '1 epoch and 1 step', '1.01 epochs', '1.99 epochs', '3 epochs']
    """
    epochs, rest = divmod(num_steps, steps_per_epoch)
    whole, share = counted(epochs, "epochs"), rest / steps_per_epoch
    if not rest:
        return whole
    if not epochs:
        return f"{min(share, 0.99):.2g} of an epoch"
    if share < 0.005:
        return f"{whole} and {counted(rest, 'steps')}"
    return f"{epochs + min(max(round(share, 2), 0.01), 0.99):,.10g} epochs"


def _division(steps: Steps, found: BlockFigures) -> list[str]:
    ranks = "on 1 rank" if steps.world_size == 1 else f"on each of {steps.world_size} ranks"
    made, bound = int(found.micro_batches.sum()), int(found.fewest.sum())
    fewest = "the fewest possible" if made == bound else f"at least {bound:,} are needed"
    fill = found.filled.sum() / (made * steps.world_size * steps.max_tokens)
    lines = [
        f"micro-batches  {made:,} {ranks}, at most {found.micro_batches.max():,} a step; {fewest}",
        f"fill           {fill:.1%} of the {counted(steps.max_tokens, 'tokens')} that a micro-batch may have",
    ]
    if steps.world_size > 1:
        total = found.makespan.sum()
        lines.append(
            f"waiting        {1 - found.even.sum() / total:.1%} of the time, for the slowest rank; another division takes at "
            f"most {1 - found.least.sum() / total:.1%} less time"
        )
    return lines
