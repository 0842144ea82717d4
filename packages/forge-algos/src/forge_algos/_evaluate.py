"""Packed rows → a mean loss that does not depend on how they were cut into batches."""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._errors import NoTargetsError
from forge_algos._guard import guard_packed
from forge_algos._modules import mode
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
) -> Evaluation:
    """The objective's loss over all batches, in evaluation mode and without gradients.

    Sums and counts are added up and divided once, at the end, so that the cut into batches changes nothing. Modes and random
    state are as before afterwards. Arguments as in `train`.

    Raises:
        NoTargetsError: no batch has anything to learn.
        PackedBatchError: a batch is malformed, or a forward would mix documents.
    """
    device = next(model.parameters()).device if device is None else device
    sums: list[torch.Tensor] = []
    count = 0
    with mode(model, training=False), guard_packed(model), torch.no_grad():
        terms_of = objective.bind(model, device=device)
        for batch in batches:
            if objective.count(batch):
                with autocast():
                    terms = terms_of(batch)
                sums.append(terms.sum)
                count += terms.count
    if not count:
        raise NoTargetsError("the evaluation's batches hold no learned token: every label is -100, or there is no batch")
    return Evaluation(loss=math.fsum(torch.stack(sums).tolist()) / count, loss_tokens=count)
