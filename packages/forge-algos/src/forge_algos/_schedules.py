"""A step's number → the factor on the learning rate."""

import math
from typing import TYPE_CHECKING

from forge_algos._settings import OptimizerSettings, Schedule

if TYPE_CHECKING:
    import torch


def lr_factor(step: int, *, num_steps: int, warmup_steps: int = 0, lr_scheduler: Schedule = "cosine") -> float:
    """What the learning rate is multiplied by at `step`, counted from 1.

    With w = warmup_steps and N = num_steps:

        step ≤ w:  step / w                     rises to 1 at step w
        step > w:  with x = (step - 1 - w) / (N - w), 0 at the first step after the warm-up and 1 at step N + 1:
                   cosine: (1 + cos(π x)) / 2      linear: 1 - x      constant: 1

    The decay is that of transformers' `get_scheduler`, and without a warm-up so is every step. Its warm-up is one step later,
    so that its first step has rate 0 and teaches nothing; ours has 1 / w.

    >>> [round(lr_factor(s, num_steps=4, warmup_steps=2, lr_scheduler="linear"), 2) for s in (1, 2, 3, 4, 5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if step <= warmup_steps:
        return step / warmup_steps
    if lr_scheduler == "constant":
        return 1.0
    x = min(1.0, (step - 1 - warmup_steps) / max(1, num_steps - warmup_steps))
    return 1.0 - x if lr_scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * x))


def schedule(
    optimizer: "torch.optim.Optimizer", settings: OptimizerSettings, num_steps: int
) -> "torch.optim.lr_scheduler.LambdaLR":
    """Torch's LambdaLR over `lr_factor`; stepped once after each optimizer step."""
    from torch.optim.lr_scheduler import LambdaLR

    def factor(done: int) -> float:
        return lr_factor(done + 1, num_steps=num_steps, warmup_steps=settings.warmup_steps, lr_scheduler=settings.lr_scheduler)

    return LambdaLR(optimizer, factor)
