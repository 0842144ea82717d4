"""A BatchPlan to a few lines that a person reads before the run."""

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from forge_packing._batch_plan import BatchPlan


def summarise(plan: "BatchPlan") -> str:
    """Samples, steps and epochs; tokens; micro-batches against their lower bound; fill. No line end at the last line.

    The bound for a step on R ranks is ceil(tokens / (max_tokens * R)) micro-batches a rank. Fill is the share of all
    micro-batches' budgets, empty ones included, that holds a token.
    """
    tokens = plan.tokens
    micro_batches = np.diff(plan._pass_starts)
    bound = -(-tokens // (plan.max_tokens * plan.world_size))
    epochs = plan.epoch(plan.num_steps - 1) + 1
    run = "1 epoch" if epochs == 1 else f"{epochs:,} epochs"
    fill = tokens.sum() / (micro_batches.sum() * plan.world_size * plan.max_tokens)
    order = f"shuffled by seed {plan.seed}" if plan.shuffle else "in the order of the data"
    ranks = "on 1 rank" if plan.world_size == 1 else f"on each of {plan.world_size} ranks"
    lines = [
        f"samples        {plan.num_samples:,} ({plan.lengths.size:,} in the data), {order}",
        f"steps          {plan.num_steps:,} of at most {plan.batch_size:,} samples, {run}",
        f"tokens         {tokens.sum():,}, a step {tokens.min():,} to {tokens.max():,}",
        f"micro-batches  {micro_batches.sum():,} {ranks}, lower bound {bound.sum():,}; at most {micro_batches.max():,} a step",
        f"fill           {fill:.1%} of {plan.max_tokens:,} tokens",
    ]
    if plan.loss_counts is not None:
        learned = plan.loss_tokens
        none = int((learned == 0).sum())
        line = f"loss tokens    {learned.sum():,}, a step {learned.min():,} to {learned.max():,}"
        lines.insert(3, line + (f"; steps with none: {none:,}" if none else ""))
    return "\n".join(lines)
