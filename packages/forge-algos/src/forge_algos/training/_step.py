"""Sums over a step: the objective's measurements, its terms, and its further sums.

`train` and `evaluate` use it, so that both add up alike. Numbers stay on the device until all of a step's are there.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._modules import free_gathered
from forge_algos._parallel import Parallel
from forge_algos.losses import LossTerms
from forge_algos.objectives import Bound, Objective
from forge_algos.objectives._objective import BeginsSteps, LoadsBatches
from forge_algos.training._columns import Columns


@attrs.define
class Sums:
    """This rank's sums of the loss and of the objective's stats, one entry a batch.
    They stay on the device until they are read.
    """

    names: tuple[str, ...]
    rows: list[torch.Tensor] = attrs.field(factory=list)

    def add(self, terms: LossTerms) -> None:
        """Record a batch's sums, all in the loss's dtype."""
        loss = terms.sum.detach()
        self.rows += [loss, *(terms.stats[name].detach().to(loss) for name in self.names)]

    def read(self, *further: torch.Tensor) -> tuple[list[float], list[float]]:
        """Add up [loss, *stats] over the batches, and read `further` scalars with them.
        It waits for the device once.
        """
        width = 1 + len(self.names)
        tensors = [*self.rows, *(f.to(self.rows[0]) if self.rows else f for f in further)]
        values = torch.stack(tensors).tolist() if tensors else []
        cut = len(self.rows)
        return [exact_sum(values[k:cut:width]) for k in range(width)], values[cut:]


def exact_sum(values: Sequence[float]) -> float:
    """Sum exactly, rounding once; infinities and NaNs are summed as Python does.
    fsum refuses infinities of opposite signs.
    """
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def measure_totals(
    bound: Bound,
    steps: Iterable[tuple[Sequence[Any], Columns]],
    objective: Objective,
    autocast: Callable[[], AbstractContextManager[Any]],
    parallel: Parallel,
) -> list[float]:
    """Add up `bound.measure` over micro-batches and data shards."""
    if not bound.needs:
        return []
    found: list[torch.Tensor | float] = []
    with torch.no_grad():
        for micro_batches, counted in steps:
            for k in counted.active:
                mine = counted.mine[k] > 0
                with autocast():
                    numbers = list(bound.measure(micro_batches[k] if mine else objective.idle()))
                if len(numbers) != bound.needs:
                    raise ValueError(f"measure gave {len(numbers)} numbers, and needs says {bound.needs}")
                if mine:
                    found += numbers
    tensors = [number for number in found if isinstance(number, torch.Tensor)]
    read = iter(torch.stack([t.detach() for t in tensors]).tolist() if tensors else [])
    values = [next(read) if isinstance(number, torch.Tensor) else float(number) for number in found]
    return parallel.sum([exact_sum(values[k :: bound.needs]) for k in range(bound.needs)])


def begin_step(
    bound: Bound,
    steps: Iterable[tuple[Sequence[Any], Columns]],
    autocast: Callable[[], AbstractContextManager[Any]],
    parallel: Parallel,
) -> None:
    """Give an objective that asks for it all micro-batches of a step beforehand; others nothing."""
    if not isinstance(bound, BeginsSteps):
        return
    batches = [micro_batches[k] if counted.mine[k] > 0 else None for micro_batches, counted in steps for k in counted.active]
    with autocast():
        bound.begin(batches, parallel)


def loaded(bound: Bound, batches: Iterable[Any]) -> list[Any]:
    """Return a step's batches, loaded if the objective does that beforehand.

    Those with images are not: their pixels would take memory until the step's end.
    """
    if not isinstance(bound, LoadsBatches):
        return list(batches)
    return [batch if getattr(batch, "media_inputs", None) is not None else bound.load(batch) for batch in batches]


@contextmanager
def optimizer_training(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[None]:
    """Put an optimizer that has modes into training mode inside the block, and out of it after.

    Its weights in training are not the ones that it has found: those are in place wherever the caller can look.
    """
    for_training, for_use = getattr(optimizer, "train", None), getattr(optimizer, "eval", None)
    if not callable(for_training) or not callable(for_use):
        yield
        return
    # The caller may have measured the model since the last step, and a probe runs before the first one.
    free_gathered(model)
    for_training()
    try:
        yield
    finally:
        free_gathered(model)
        for_use()
