"""KL divergence of a model from the one that it began as, over the tokens of packed rows."""

from collections.abc import Mapping, Sequence
from typing import Literal

import attrs
import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model
from forge_algos.adaptations._switched_off import check_switchable, switched_off
from forge_algos.batches._learned import AnyRow, LearnedRow, RowLoader
from forge_algos.heads._head import Head, choose_head
from forge_algos.heads._packable import require_packable
from forge_algos.isolation._guard import guard_packed
from forge_algos.isolation._prompt_sharing import shares_prompts
from forge_algos.losses import LossTerms
from forge_algos.losses.distillation._compare import Compared
from forge_algos.objectives._tokens import LearnedTokens

Base = nn.Module | Literal["adapter_off"]
"""A frozen model, or the trained one with its adapter switched off."""


@attrs.frozen(kw_only=True, eq=False)
class BaseKL(LearnedTokens):
    """KL(base ‖ model) at each learned token, over the whole vocabulary: a figure, no loss.

    RL's Razor (arXiv 2509.04259) finds that this divergence, on the inputs of the new task, predicts how much of the old ones a
    model forgets. The direction is the forward one of that paper: it grows where the model no longer does what its base did.
    """

    base: Base = attrs.field(repr=False)

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the sums behind the figures."""
        return ("base_nll", "nll")

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide by the number of tokens: `base_nll` and `nll`, both models' losses on the targets."""
        return {name: sums[name] / count for name in self.stats}

    def bind(self, model: nn.Module, *, device: torch.device) -> "BoundBaseKL":
        """Choose how the heads of both are scored.

        Raises:
            LossError: the base is the model.
            AdapterError: base="adapter_off", and the model without its adapter is not its base.
            PackedBatchError: one of the two does not keep the documents of a packed row apart.
        """
        return BoundBaseKL(model, self.base, device)


class BoundBaseKL:
    """A `BaseKL` on one model."""

    needs = 0

    def __init__(self, model: nn.Module, base: Base, device: torch.device) -> None:
        """Choose how the heads are scored."""
        require_packable(model, device=device)
        # Rows may share prompts, which each model that reads them has to be tried with.
        shares_prompts(model, device=device)
        self._model = model
        self._head = choose_head(model, device=device)
        self._load = RowLoader(model, device)
        self._base_head: Head | None = None
        if isinstance(base, str):
            check_switchable(model)
            return
        if causal_model(base) is causal_model(model):
            raise LossError("the base is the model itself, from which it never diverges; load it a second time")
        base.eval()
        require_packable(base, device=device)
        shares_prompts(base, device=device)
        self._base_head = choose_head(base, device=device)

    def measure(self, batch: AnyRow) -> Sequence[float]:  # noqa: ARG002  the protocol's
        """Return nothing: tokens are measured one by one."""
        return []

    def compare(self, batch: AnyRow) -> tuple[LearnedRow, Compared]:
        """Compare both models at every learned token of a row."""
        row = self._load(batch)
        if self._base_head is None:
            with switched_off(self._model):
                base = self._head.hold(row.inputs, row.rows)
            return row, self._head.compare(row.inputs, row.rows, row.targets, base)
        with guard_packed(self._base_head.model):
            return row, self._head.compare(row.inputs, row.rows, row.targets, self._base_head)

    def __call__(self, batch: AnyRow, totals: Sequence[float] = ()) -> LossTerms:  # noqa: ARG002  the protocol's
        """Sum the divergences of a row's learned tokens, times their weights where they have some."""
        row, found = self.compare(batch)
        kl, base_nll, nll = (part if row.weights is None else part * row.weights for part in found)
        return LossTerms(kl.sum(), row.count, {"base_nll": base_nll.sum(), "nll": nll.sum()})
