"""Two models on the same rows → what changed between them, token by token."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._modules import mode
from forge_algos.batches._learned import AnyRow
from forge_algos.isolation._guard import guard_packed
from forge_algos.objectives._base_kl import Base, BoundBaseKL

Floats = NDArray[np.float64]


@attrs.frozen(kw_only=True, eq=False)
class TokenChanges:
    """Change at each of the M learned tokens of a row, in the row's order; in nats."""

    kl: Floats
    """float64[M]: KL(base ‖ model) of the distributions that predict the token."""
    before: Floats
    """float64[M]: the base's loss on the token."""
    after: Floats
    """float64[M]: the model's."""


def token_changes(
    model: nn.Module,
    batches: Iterable[AnyRow],
    *,
    base: Base,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[TokenChanges]:
    """Compare a model with its base at every learned token of packed rows, without gradients.

    Args:
        model: the trained model.
        batches: packed rows of documents, or of groups.
        base: the model that it began as, or "adapter_off": the model without its adapter.
        device: where rows go; the model's by default.
        autocast: context of the forwards.

    Yields:
        TokenChanges: of each row.

    Raises:
        LossError: two vocabularies, or the base is the model.
        PackedBatchError: a row is malformed, or a model would mix its documents.
    """
    device = next(model.parameters()).device if device is None else device
    with mode(model, training=False), guard_packed(model), torch.no_grad():
        bound = BoundBaseKL(model, base, device)
        for batch in batches:
            with autocast():
                _, found = bound.compare(batch)
            # On the CPU first: not every device has float64.
            yield TokenChanges(
                kl=found.kl.cpu().double().numpy(),
                before=found.base_nll.cpu().double().numpy(),
                after=found.nll.cpu().double().numpy(),
            )
