"""A BatchPlan to a few lines that a person reads before the run."""

from typing import TYPE_CHECKING

from forge_packing.planning._figures import BlockFigures, block_figures, together
from forge_packing.planning._steps_from_sampled import sampled_stretches

if TYPE_CHECKING:
    from forge_packing.planning._batch_plan import BatchPlan

MEASURED_SAMPLES, MEASURED_STEPS, STRETCHES = 2**14 - 1, 2**10, 8
"""A longer run is measured in part: in so many stretches from its first step to its last, which hold so many at most.

Python divides so few before compiled code is asked for, and the bounds of so many steps take under a second.
"""


def summarise(plan: "BatchPlan") -> str:
    """Samples, steps and epochs; shares; tokens; micro-batches, fill and makespan beside their bounds. No line end at the end.

    Fill is the share of all micro-batches' budgets, empty ones included, that holds a token. The makespan adds up, pass by
    pass, the slowest rank's cost; its bound is what no division of those samples could beat.
    """
    steps = plan._steps
    most = max(1, min(MEASURED_STEPS, MEASURED_SAMPLES // min(plan.batch_size, plan.lengths.size)))
    stretches = sampled_stretches(steps, most, STRETCHES)
    parts = [block_figures(plan, steps.stretch(first, stop), 0, stop - first) for first, stop in stretches]
    found = together(parts)
    measured = found.tokens.size
    order = f"shuffled by seed {plan.seed}" if plan.shuffle else "in the order of the data"
    if plan.endless:
        lines = [
            f"samples        {plan.lengths.size:,} in the data, {order}",
            f"steps          without end, of at most {plan.batch_size:,} samples",
        ]
    else:
        epochs = plan.epoch(plan.num_steps - 1) + 1
        run = "1 epoch" if epochs == 1 else f"{epochs:,} epochs"
        lines = [
            f"samples        {plan.num_samples:,} ({plan.lengths.size:,} in the data), {order}",
            f"steps          {plan.num_steps:,} of at most {plan.batch_size:,} samples, {run}",
        ]
    if plan.weights is not None:
        shown = ", ".join(f"{share:.4g}" for share in (plan.weights / plan.weights.sum())[:8].tolist())
        more = f" and {plan.weights.size - 8} more" if plan.weights.size > 8 else ""
        lines.append(f"sources        {plan.weights.size:,}, with shares {shown}{more}")
    if plan.endless or measured < plan.num_steps:
        if len(stretches) == 1:
            lines.append(f"measured       the first {measured:,} steps:")
        else:
            lines.append(f"measured       {measured:,} steps, in {len(stretches)} stretches from the first to the last:")
    return "\n".join([*lines, *_measured(plan, found)])


def _measured(plan: "BatchPlan", found: BlockFigures) -> list[str]:
    ranks = "on 1 rank" if plan.world_size == 1 else f"on each of {plan.world_size} ranks"
    fill = found.tokens.sum() / (found.micro_batches.sum() * plan.world_size * plan.max_tokens)
    lines = [
        f"tokens         {found.tokens.sum():,}, a step {found.tokens.min():,} to {found.tokens.max():,}",
        f"micro-batches  {found.micro_batches.sum():,} {ranks}, lower bound {found.fewest.sum():,}; "
        f"at most {found.micro_batches.max():,} a step",
        f"fill           {fill:.1%} of {plan.max_tokens:,} tokens",
        f"makespan       {found.makespan.sum() / found.least.sum():.3f} of its lower bound; "
        f"slowest rank of a pass over the mean {found.makespan.sum() / found.even.sum():.3f}",
    ]
    if found.loss_tokens is not None:
        none = int((found.loss_tokens == 0).sum())
        line = f"loss tokens    {found.loss_tokens.sum():,}, a step {found.loss_tokens.min():,} to {found.loss_tokens.max():,}"
        lines.insert(1, line + (f"; steps with none: {none:,}" if none else ""))
    return lines
