"""Mean loss over batches, however they were cut."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._errors import NoTargetsError
from forge_algos._modules import mode
from forge_algos._parallel import ALONE, Parallel
from forge_algos.isolation._guard import guard_packed
from forge_algos.objectives import Objective
from forge_algos.objectives._objective import BeginsSteps
from forge_algos.training._columns import Columns, columns
from forge_algos.training._step import Sums, begin_step, measure_totals


@attrs.frozen(kw_only=True)
class Evaluation:
    """Mean loss of an evaluation, and the number of its terms."""

    loss: float
    """Mean over all terms of all batches (learned tokens, pairs)."""
    loss_count: float
    """Number of terms, of the objective's `unit`; the sum of their weights, if they have any."""
    figures: Mapping[str, float] = attrs.field(factory=dict)
    """The objective's figures beside the loss, over all batches: an accuracy, a margin."""


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    objective: Objective,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    parallel: Parallel = ALONE,
) -> Evaluation:
    """Compute the objective's loss over all batches, in evaluation mode and without gradients.

    Sums and counts are added up and divided once, at the end, so that neither the cut into batches nor the number of ranks
    changes anything. Modes and random state are as before afterwards. Arguments as in `train`; each rank has batches of its
    own, all of them equally many, and all get the same result. Batches are read one by one, but for an objective that measures
    the whole of them beforehand: then all are held.

    Raises:
        NoTargetsError: no batch of any rank has anything to learn.
        PackedBatchError: a batch is malformed, or a forward would mix documents.
        UnevenRanksError: the ranks were not given equally many batches.
    """
    device = next(model.parameters()).device if device is None else device
    sums, count = Sums(objective.stats), 0
    with mode(model, training=False), guard_packed(model), torch.no_grad():
        with autocast():
            bound = objective.bind(model, device=device)
        steps: Iterable[tuple[list[Any], Columns]] = _steps(batches, objective, parallel)
        totals: list[float] = []
        if bound.needs or isinstance(bound, BeginsSteps):
            steps = list(steps)
            begin_step(bound, steps, autocast, parallel)
            totals = measure_totals(bound, steps, objective, autocast, parallel)
        for (batch,), found in steps:
            mine = bool(found.mine[0])
            with autocast():
                # Over a made-up row where only another rank has something to learn.
                terms = bound(batch if mine else objective.idle(), totals)
            if mine:
                sums.add(terms)
            count += found.count
    if not count:
        raise NoTargetsError(
            "the evaluation's batches hold no learned token: every label is -100, or there is no batch"
            if objective.unit == "tokens"
            else f"the evaluation's batches hold no {objective.unit}"
        )
    total, *stats = parallel.sum(sums.read()[0])
    return Evaluation(
        loss=total / count, loss_count=count, figures=objective.figures(dict(zip(sums.names, stats, strict=True)), count)
    )


def _steps(batches: Iterable[Any], objective: Objective, parallel: Parallel) -> Iterator[tuple[list[Any], Columns]]:
    """Yield each batch by itself with all shards' counts of it, if any shard has anything in it."""
    remaining = iter(batches)
    while True:
        given = [batch for batch in (next(remaining, None),) if batch is not None]
        found = columns(given or None, objective, parallel)
        if found is None:
            return
        if found.count:
            yield given, found
