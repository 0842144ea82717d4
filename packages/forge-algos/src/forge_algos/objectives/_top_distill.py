"""Distillation from a teacher's stored log-probabilities, without the teacher."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import numpy as np
import torch
from torch import nn

from forge_algos._modules import mode, vocabulary
from forge_algos.batches._copies import to_device
from forge_algos.batches._learned import RowLoader, loss_count, sample_count, token_count
from forge_algos.batches._packed import PackedBatch
from forge_algos.batches._top import TopBatch, check_top
from forge_algos.heads._head import choose_head
from forge_algos.heads._packable import require_packable
from forge_algos.isolation._guard import guard_packed
from forge_algos.losses import LossTerms, TopTokens
from forge_algos.objectives._tokens import LearnedTokens
from forge_algos.settings._supervised import DistillSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen(kw_only=True, eq=False)
class TopDistill:
    """Distillation from a teacher's K likeliest tokens at each learned token, stored before.

    `losses.top_distillation` is the term of a token; batches are `TopBatch`, as `top_logps` gives their numbers. Of
    `settings` it reads `beta` and `temperature`, the one at which the teacher's were computed.
    """

    settings: DistillSettings = attrs.field(validator=settings_of(DistillSettings))

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "tokens"

    @property
    def stats(self) -> tuple[str, ...]:
        """Name of the sum behind the figure."""
        return ("kl",)

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide by the number of learned tokens: `kl`, KL(teacher ‖ model) over K + 1 classes."""
        return {"kl": sums["kl"] / count}

    def count(self, batch: TopBatch) -> float:
        """Add up the weights of the learned tokens, without a forward."""
        return loss_count(batch.row)

    def samples(self, batch: TopBatch) -> int:
        """Count the documents of a row."""
        return sample_count(batch.row)

    def tokens(self, batch: TopBatch) -> int:
        """Count all tokens of a row."""
        return token_count(batch.row)

    def idle(self) -> TopBatch:
        """Make a row of one learned token, of which the teacher is half sure."""
        half = np.log(np.full((1, 1), 0.5, np.float32))
        return TopBatch(row=LearnedTokens().idle(), ids=np.zeros((1, 1), np.int32), logps=half, rest=half[0])

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundTopDistill":
        """Choose how the head is scored.

        Raises:
            PackedBatchError: the model does not keep the documents of a packed row apart.
            AdapterError: virtual tokens that the model cannot be given.
        """
        require_packable(model, device=device)
        return _BoundTopDistill(self.settings, model, device)


class _BoundTopDistill:
    needs = 0

    def __init__(self, settings: DistillSettings, model: nn.Module, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self.head = choose_head(model, device=device)
        self._load, self._vocabulary = RowLoader(model, device), vocabulary(model)

    def measure(self, batch: TopBatch) -> Sequence[float]:  # noqa: ARG002  the protocol's
        return []

    def __call__(self, batch: TopBatch, totals: Sequence[float] = ()) -> LossTerms:  # noqa: ARG002
        check_top(batch, self._vocabulary)
        row, s = self._load(batch.row), self._settings
        top = TopTokens(
            to_device(batch.ids, self._device, torch.int64),
            to_device(batch.logps, self._device, torch.float32),
            to_device(batch.rest, self._device, torch.float32),
        )
        terms = self.head.top_distillation(
            row.inputs, row.rows, top, beta=s.beta, temperature=s.temperature, weights=row.weights
        )
        return terms._replace(count=row.count)


def top_logps(
    teacher: nn.Module,
    batches: Iterable[PackedBatch],
    *,
    k: int,
    below: int | None = None,
    temperature: float = 1.0,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[TopBatch]:
    """Find a teacher's k likeliest tokens in the place of every learned token of packed rows.

    Args:
        teacher: the model, whose vocabulary is that of the rows.
        batches: packed rows.
        k: how many; all where the vocabulary has fewer.
        below: number of the tokenizer's ids, where the model has more: the probability of the others is of the rest.
        temperature: divisor of its logits.
        device: where rows go; the model's by default.
        autocast: context of the forwards.

    Yields:
        TopBatch: each row with the teacher's tokens, the likeliest first, on the host.

    Raises:
        PackedBatchError: a row is malformed, or the model would mix its documents.
    """
    device = next(teacher.parameters()).device if device is None else device
    with mode(teacher, training=False), torch.no_grad():
        require_packable(teacher, device=device)
        head, load = choose_head(teacher, device=device), RowLoader(teacher, device)
        for batch in batches:
            row = load(batch)
            with guard_packed(teacher), autocast():
                found = head.top(row.inputs, row.rows, k, below=below, temperature=temperature)
            ids, logps, rest = (each.cpu() for each in found)
            yield TopBatch(row=batch, ids=ids.numpy().astype(np.int32), logps=logps.float().numpy(), rest=rest.float().numpy())
