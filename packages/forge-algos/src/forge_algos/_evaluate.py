"""Packed rows → a mean loss that does not depend on how they were cut into batches."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._columns import columns
from forge_algos._errors import NoTargetsError
from forge_algos._guard import guard_packed
from forge_algos._modules import mode
from forge_algos._parallel import ALONE, Parallel
from forge_algos.objectives import Objective


@attrs.frozen(kw_only=True)
class Evaluation:
    """A mean loss and what it is a mean over."""

    loss: float
    """Mean over all learned tokens of all batches, in nats."""
    loss_tokens: int
    """How many those are."""


def evaluate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    objective: Objective,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    parallel: Parallel = ALONE,
) -> Evaluation:
    """The objective's loss over all batches, in evaluation mode and without gradients.

    Sums and counts are added up and divided once, at the end, so that neither the cut into batches nor the number of ranks
    changes anything. Modes and random state are as before afterwards. Arguments as in `train`; each rank has batches of its
    own, all of them equally many, and all get the same result.

    Raises:
        NoTargetsError: no batch of any rank has anything to learn.
        PackedBatchError: a batch is malformed, or a forward would mix documents.
        UnevenRanksError: the ranks were not given equally many batches.
    """
    device = next(model.parameters()).device if device is None else device
    sums: list[torch.Tensor] = []
    count = 0
    with mode(model, training=False), guard_packed(model), torch.no_grad():
        terms_of = objective.bind(model, device=device)
        # A pass over a row that counts nothing, where another rank has something to do.
        remaining = iter(batches)
        while True:
            batch = next(remaining, None)
            found = columns(None if batch is None else [batch], objective, parallel)
            if found is None:
                break
            if not found.loss_tokens:
                continue
            with autocast():
                terms = terms_of(batch if found.mine[0] else objective.idle())
            if found.mine[0]:
                sums.append(terms.sum)
            count += found.loss_tokens
    if not count:
        raise NoTargetsError("the evaluation's batches hold no learned token: every label is -100, or there is no batch")
    (total,) = parallel.sum([math.fsum(torch.stack(sums).tolist()) if sums else 0.0])
    return Evaluation(loss=total / count, loss_tokens=count)
