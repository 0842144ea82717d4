"""References: stored log-probabilities, the model under its adapter, or a second model."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import mode, unwrap
from forge_algos.adaptations._switched_off import check_switchable, switched_off
from forge_algos.batches._groups import PackedGroups, idle_groups
from forge_algos.batches._packed import require
from forge_algos.heads._completions import Completions, sum_by_completion, to_float32
from forge_algos.isolation._guard import guard_packed
from forge_algos.objectives._objective import Weights
from forge_algos.objectives.preference._pairs import sum_pairs
from forge_algos.settings._preference import ReferenceKind

AddUp = Callable[[torch.Tensor, PackedGroups], torch.Tensor]
"""Function of tokens' log-probabilities float32[M] and their groups: those of the completions, float32[B]."""


class Reference:
    """Log-probabilities under the reference, without gradients and without dropout.

    Args:
        kind: "stored" reads arrays of the batch, "adapter_off" and "live" make a forward, "moving" has made its forwards when
            the step began.
        policy: the model that is trained; its adapter is switched off for "adapter_off".
        live: the second model, for "live" and only for it, which never changes; for "moving" what gives the policy the
            reference's weights.
        add_up: adds up tokens' log-probabilities, as for the policy.

    Raises:
        LossError: "live" without a model, a model without "live", or the very model that is trained; "moving" without weights.
        AdapterError: "adapter_off" where the model carries no adapter.
    """

    def __init__(
        self,
        kind: ReferenceKind,
        policy: Completions,
        live: nn.Module | Weights | None,
        add_up: AddUp = sum_by_completion,
    ) -> None:
        model = live if isinstance(live, nn.Module) else None
        if kind == "moving" and (live is None or model is not None):
            raise LossError("reference='moving': a function is wanted, such as WeightAverage(...).exchanged")
        if kind != "moving" and (kind == "live") != (live is not None):
            wanted = "a model is wanted" if live is None else "reference=... would not be read: leave it out, or set 'live'"
            raise LossError(f"reference={kind!r}: {wanted}")
        if kind == "live" and model is None:
            raise LossError(f"reference='live': a model is wanted, not {type(live).__name__}")
        if model is not None and unwrap(model) is unwrap(policy.model):
            raise LossError("reference='live': it is the very model that is trained, and would move with it; load it twice")
        if kind == "adapter_off":
            check_switchable(policy.model)
        self.kind = kind
        self._off = kind == "adapter_off"
        self._add_up = add_up
        self._model = policy if model is None else Completions(model, device=policy.device)
        self._weights = None if live is None or model is not None else live
        self._begun: dict[int, tuple[PackedGroups, torch.Tensor]] | None = None
        self._idle = False

    def begin(self, rows: Sequence[PackedGroups | None], *, completions: int) -> None:
        """Score a step's rows with the moving reference, for which the weights are exchanged once.

        Args:
            rows: of this rank, None where it has nothing and others have.
            completions: size of the made-up group in that place.
        """
        assert self._weights is not None
        self._begun, self._idle = {}, None in rows
        with self._weights(self._model.model):
            for row in rows:
                groups = idle_groups((completions,)) if row is None else row
                found = self._add_up(self.tokens(groups), groups)
                if row is not None:
                    # The row is held, so that its address stands for it alone.
                    self._begun[id(row)] = row, found

    def __call__(self, groups: PackedGroups, stored: ArrayLike | None, name: str = "ref_logps") -> torch.Tensor:
        """Return the completions' log-probabilities float32[B], in nats."""
        if self._weights is not None:
            return self._as_begun(groups)
        if self.kind != "stored":
            return self._add_up(self.tokens(groups), groups)
        return self.read(stored, name)

    def _as_begun(self, groups: PackedGroups) -> torch.Tensor:
        """Return what `begin` found for a row; zeros for a made-up one, of which nothing counts."""
        known = None if self._begun is None else self._begun.get(id(groups))
        if known is not None:
            return known[1]
        if not self._idle:
            raise LossError(
                "the reference moves, and is asked once for a whole step: before its first micro-batch call "
                "begin(micro_batches, forge_algos.ALONE), or with the strategy of several ranks, as train does"
            )
        return torch.zeros(len(groups.lengths), device=self._model.device)

    def read(self, stored: ArrayLike | None, name: str) -> torch.Tensor:
        """Return a stored array of the batch, or raise LossError where it is missing or not finite."""
        if stored is None:
            raise LossError(
                f"{name}: reference='stored' reads it and the batch has none; compute it with reference_logps(...) before "
                "training, or set reference='adapter_off' or 'live'"
            )
        wrong = np.flatnonzero(~np.isfinite(stored))
        if len(wrong):
            raise LossError(
                f"{name}: number {wrong[0]} of {np.size(stored)} is {np.ravel(stored)[wrong[0]]}, and a finite one is wanted "
                "for each completion: score this one again with reference_logps(...), or leave its row out"
            )
        return to_float32(stored, self._model.device)

    def tokens(self, groups: PackedGroups) -> torch.Tensor:
        """Compute the log-probability of each token in a forward, float32[M]."""
        model = self._model.model
        with torch.no_grad(), mode(model, training=False), switched_off(model) if self._off else nullcontext():
            return self._model.tokens(groups)


def reference_logps(
    model: nn.Module,
    batches: Iterable[PackedGroups],
    *,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
    adapter_off: bool = False,
    ld_alpha: float | None = None,
) -> Iterator[NDArray[np.float32]]:
    """Compute the log-probabilities that are stored beside the data before training.

    One forward a row, in evaluation mode and without gradients.

    Where the model is divided over ranks, every rank gives equally many rows, empty ones where it has nothing.

    Args:
        model: the reference: what training starts from, or another.
        batches: rows of groups; for pairs, groups of two.
        device: where rows go; the model's by default.
        autocast: as in training, so that the loss begins where it should.
        adapter_off: switch the model's adapter off for it.
        ld_alpha: of `DPOSettings`, where it has one; groups are pairs.

    Yields:
        NDArray: for each row float32[B], of its completions, in nats.

    Raises:
        PackedBatchError: a row is malformed, or the model does not keep its documents apart.
        AdapterError: `adapter_off` where the model carries no adapter.
    """
    add_up = sum_by_completion if ld_alpha is None else partial(sum_pairs, ld_alpha=ld_alpha)
    device = next(model.parameters()).device if device is None else device
    with torch.no_grad(), mode(model, training=False), guard_packed(model):
        policy = Completions(model, device=device)
        for groups in batches:
            with switched_off(model) if adapter_off else nullcontext(), autocast():
                require(groups, "group_sizes", "a packed row of groups, such as batch.groups,")
                empty = not len(groups.group_sizes)
                tokens = policy.tokens(idle_groups((1,)) if empty else groups)
            yield (tokens[:0] if empty else add_up(tokens, groups)).cpu().numpy()
