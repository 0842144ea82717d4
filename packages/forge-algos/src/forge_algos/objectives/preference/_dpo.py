"""Direct preference optimisation: how far each completion of a pair is from the reference."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar, NamedTuple

import attrs
import numpy as np
import torch
from torch import nn

from forge_algos._parallel import Parallel
from forge_algos.heads._completions import Completions, sum_by_completion
from forge_algos.losses import LossTerms, dpo, wpo_weights
from forge_algos.objectives._mean import Mean
from forge_algos.objectives._objective import BeginsSteps, Weights
from forge_algos.objectives.preference._pairs import (
    Pairwise,
    PreferenceBatch,
    check_pairs,
    chosen_tokens,
    lengths,
    sides,
    sum_pairs,
)
from forge_algos.objectives.preference._reference import Reference
from forge_algos.settings._preference import DPOSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen
class DPO(Pairwise):
    """DPO (arXiv 2305.18290; `losses.dpo`): -log σ(β(c - r)) of log-ratios, and its other forms.

    c and r are log π/π_ref of the chosen and the rejected completion. One forward a row, over both completions of each pair; a
    second one without gradients where the reference is not stored. Batches are `PreferenceBatch`. Gradients do not depend on
    how a step is cut: a pair's term depends on no other pair, and the mean over tokens in `sft` is taken over the chosen tokens
    of the whole step.
    """

    settings: DPOSettings = attrs.field(factory=DPOSettings, validator=settings_of(DPOSettings))
    reference: nn.Module | Weights | None = attrs.field(default=None, kw_only=True)
    """The frozen second model of `reference="live"`, on the same device; of "moving" what gives the trained model
    the reference's weights, as `WeightAverage.exchanged`; None otherwise."""

    shown: ClassVar[dict[str, str]] = Pairwise.shown | {"chosen_logp": "chosen_logps", "rejected_logp": "rejected_logps"}

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundDPO":
        """Choose how this model, and a live reference, are run.

        Raises:
            PackedBatchError: a model does not keep the completions of a row apart.
            AdapterError: virtual tokens that a model cannot be given, or `adapter_off` without an adapter.
            LossError: a live or moving reference that is missing, not asked for, or the model itself.
        """
        kind = _BoundMovingDPO if self.settings.reference == "moving" else _BoundDPO
        return kind(self.settings, self.reference, model, device)


class _Scores(NamedTuple):
    """What a model gives P pairs."""

    logps: torch.Tensor
    """float32[2P], of the completions, weighed by `ld_alpha`."""
    chosen: torch.Tensor
    """float32[P], of the chosen ones, not weighed."""
    weights: torch.Tensor | None
    """float32[P], of `wpo`."""


class _BoundDPO:
    def __init__(self, settings: DPOSettings, live: nn.Module | Weights | None, model: nn.Module, device: torch.device) -> None:
        self.settings = settings
        self.policy = Completions(model, device=device)
        ld_alpha = settings.ld_alpha
        self.add_up = sum_by_completion if ld_alpha is None else partial(sum_pairs, ld_alpha=ld_alpha)
        self.reference = Reference(settings.reference, self.policy, live, self.add_up)
        self.mean = Mean(settings.normalize, per_token="sft" in settings.loss_type)
        self.needs = self.mean.needs

    def measure(self, batch: PreferenceBatch) -> Sequence[float]:
        return self.mean.measure(len(batch.groups.group_sizes), chosen_tokens(batch.groups))

    def __call__(self, batch: PreferenceBatch, totals: Sequence[float]) -> LossTerms:
        scores, reference = self._scores(batch)
        return self.mean(self._terms(batch, scores, reference, self.mean.tokens_per_term(totals)), totals)

    def at_start(self, batch: PreferenceBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `check_reference` compares.

        Returns:
            tuple: terms[P]; the terms[P] of a model that is its own reference; how far the worse side of each pair is off, in
                nats[P].
        """
        scores, reference = self._scores(batch)
        found, expected = (self._terms(batch, scores, other).per_sample for other in (reference, scores.logps))
        assert found is not None
        assert expected is not None
        return found, expected, (scores.logps - reference).abs().view(-1, 2).amax(1)

    def _scores(self, batch: PreferenceBatch) -> tuple["_Scores", torch.Tensor]:
        """Score the completions under the model; and float32[2P] under the reference."""
        check_pairs(batch)
        weights = None
        if self.settings.wpo:
            tokens, collisions = self.policy.tokens_and_collision(batch.groups)
            weights = wpo_weights(tokens, collisions, torch.tensor(np.asarray(batch.groups.lengths)))
        else:
            tokens = self.policy.tokens(batch.groups)
        policy = self.add_up(tokens, batch.groups)
        chosen, _ = sides(policy if self.settings.ld_alpha is None else sum_by_completion(tokens, batch.groups))
        return _Scores(policy, chosen, weights), self.reference(batch.groups, batch.ref_logps)

    def _terms(
        self,
        batch: PreferenceBatch,
        scores: "_Scores",
        reference: torch.Tensor,
        tokens_per_pair: float | None = None,
    ) -> LossTerms:
        settings = self.settings
        return dpo(
            *sides(scores.logps),
            *sides(reference),
            **lengths(batch.groups),
            beta=settings.beta,
            loss_type=settings.loss_type,
            loss_weights=settings.loss_weights,
            label_smoothing=settings.label_smoothing,
            f_divergence=settings.f_divergence,
            f_divergence_alpha=settings.f_divergence_alpha,
            discopop_tau=settings.discopop_tau,
            sft_logps=scores.chosen,
            pair_weights=scores.weights,
            tokens_per_pair=tokens_per_pair,
        )


class _BoundMovingDPO(_BoundDPO, BeginsSteps):
    def begin(self, batches: Sequence[PreferenceBatch | None], parallel: Parallel) -> None:
        del parallel
        self.reference.begin([None if batch is None else batch.groups for batch in batches], completions=2)
