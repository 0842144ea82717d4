"""Number of a step → factor on the learning rate."""

import math
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from forge_algos._counted import counted
from forge_algos._errors import OptimizerError
from forge_algos.settings._optimizer import SCHEDULES_WITHOUT_LENGTH, OptimizerSettings, Schedule
from forge_algos.settings._validators import either

if TYPE_CHECKING:
    import torch


_ANY_LENGTH = 2**62


def lr_factor(
    step: int,
    *,
    num_steps: int | None,
    warmup_steps: int = 0,
    lr_scheduler: Schedule = "cosine",
    min_lr_ratio: float = 0.0,
    decay_steps: int | None = None,
    power: float = 1.0,
    num_cycles: int = 1,
) -> float:
    """Compute the factor on the learning rate at `step`, counted from 1.

    With w = warmup_steps and N = num_steps:

        step ≤ w:  step / w                     rises to 1 at step w
        step > w:  with x = (step - 1 - w) / (N - w), 0 at the first step after the warm-up and 1 at step N + 1:
                   cosine: (1 + cos(π x)) / 2      linear: 1 - x      constant: 1
                   cosine_with_min_lr, cosine_with_restarts, inverse_sqrt, polynomial, warmup_stable_decay: transformers' own

    The decay is that of transformers' `get_scheduler`, and without a warm-up so is every step. Its warm-up is one step later,
    so that its first step has rate 0 and teaches nothing; ours has 1 / w. Beyond step N + 1 nothing changes any more.

    Args:
        step: from 1.
        num_steps: N, the steps of the whole run; None for a run without end.
        warmup_steps: w.
        lr_scheduler: schedule after the warm-up.
        min_lr_ratio: where cosine_with_min_lr, polynomial and warmup_stable_decay end.
        decay_steps: the run's last steps, in which warmup_stable_decay comes down (as a cosine).
        power: the exponent of polynomial.
        num_cycles: the descents of cosine_with_restarts.

    Raises:
        OptimizerError: warmup_steps and decay_steps are together more than num_steps, or the schedule needs num_steps and there
            is none.

    >>> [round(lr_factor(s, num_steps=4, warmup_steps=2, lr_scheduler="linear"), 2) for s in (1, 2, 3, 4, 5)]
    [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    if num_steps is None:
        if lr_scheduler not in SCHEDULES_WITHOUT_LENGTH:
            raise OptimizerError(
                f"lr_scheduler={lr_scheduler} needs to know the end of the run: use {either(SCHEDULES_WITHOUT_LENGTH)}"
            )
        # The rate of a step is the same for every length of the run.
        num_steps = step if lr_scheduler == "constant" else _ANY_LENGTH
    if decay_steps is not None and warmup_steps + decay_steps > num_steps:
        raise OptimizerError(
            f"warmup_steps={warmup_steps} and decay_steps={decay_steps} are more than the run's "
            f"{counted(num_steps, 'steps')}: lower one of them"
        )
    if step <= warmup_steps:
        return step / warmup_steps
    if lr_scheduler == "constant":
        return 1.0
    if lr_scheduler in ("cosine", "linear"):
        x = min(1.0, (step - 1 - warmup_steps) / max(1, num_steps - warmup_steps))
        return 1.0 - x if lr_scheduler == "linear" else 0.5 * (1.0 + math.cos(math.pi * x))
    # transformers' schedules divide by num_steps - warmup_steps.
    last = max(num_steps, warmup_steps + 1)
    found = _transformers_factor(lr_scheduler, last, warmup_steps, min_lr_ratio, decay_steps, power, num_cycles)
    return float(found(min(step - 1, last)))


@cache
def _transformers_factor(
    lr_scheduler: str,
    num_steps: int,
    warmup_steps: int,
    min_lr_ratio: float,
    decay_steps: int | None,
    power: float,
    num_cycles: int,
) -> Callable[[int], float]:
    """Return transformers' schedule as a function from the number of steps taken to the factor."""
    import torch
    from transformers.optimization import get_scheduler

    kwargs: dict[str, dict[str, Any]] = {
        "cosine_with_min_lr": {"min_lr_rate": min_lr_ratio},
        "cosine_with_restarts": {"num_cycles": num_cycles},
        # An absolute rate; the highest is 1 here.
        "polynomial": {"lr_end": min_lr_ratio, "power": power},
        "warmup_stable_decay": {"min_lr_ratio": min_lr_ratio, "num_decay_steps": decay_steps},
    }
    # The function of the step is an attribute of the schedule, which is made for an optimizer.
    nothing = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    made = get_scheduler(
        lr_scheduler,
        nothing,
        num_warmup_steps=warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=kwargs.get(lr_scheduler, {}),
    )
    return made.lr_lambdas[0]


def schedule(
    optimizer: "torch.optim.Optimizer", settings: OptimizerSettings, num_steps: int | None
) -> "torch.optim.lr_scheduler.LambdaLR":
    """Make torch's LambdaLR over `lr_factor`; it is stepped once after each optimizer step.

    Raises:
        OptimizerError: a warm-up and a decay that are together longer than the run, or a schedule or a share of warm-up that
            needs the end of one that has none.
    """
    from torch.optim.lr_scheduler import LambdaLR

    try:
        warmup_steps = settings.warmup(num_steps)
    except ValueError as error:
        raise OptimizerError(str(error)) from None

    def factor(done: int) -> float:
        return lr_factor(
            done + 1,
            num_steps=num_steps,
            warmup_steps=warmup_steps,
            lr_scheduler=settings.lr_scheduler,
            min_lr_ratio=settings.min_lr_ratio,
            decay_steps=settings.decay_steps,
            power=settings.power,
            num_cycles=settings.num_cycles,
        )

    return LambdaLR(optimizer, factor)
