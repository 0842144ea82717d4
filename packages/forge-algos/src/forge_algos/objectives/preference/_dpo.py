"""Direct preference optimisation: a row of pairs → the loss of how far each side has left the reference."""

from collections.abc import Sequence
from typing import ClassVar

import attrs
import torch
from torch import nn

from forge_algos.heads._completions import Completions, tails, whole
from forge_algos.losses import LossTerms, dpo
from forge_algos.objectives._mean import Mean
from forge_algos.objectives._reference import Reference
from forge_algos.objectives.preference._pairs import Pairwise, PreferenceBatch, check_pairs, chosen_tokens, lengths, sides
from forge_algos.settings._preference import DPOSettings


@attrs.frozen
class DPO(Pairwise):
    """-log σ(β(log π/π_ref(chosen) - log π/π_ref(rejected))) and its fourteen relatives (arXiv 2305.18290; `losses.dpo`).

    One forward a row, over both completions of each pair; a second one without gradients where the reference is not stored.
    Batches are `PreferenceBatch`. Gradients do not depend on how a step is cut: a pair's term depends on no other pair, and the
    mean over tokens in `sft` is taken over the chosen tokens of the whole step.
    """

    settings: DPOSettings = attrs.field(factory=DPOSettings)
    reference: nn.Module | None = attrs.field(default=None, kw_only=True)
    """The frozen second model of `reference="live"`, on the same device; None otherwise."""

    shown: ClassVar[dict[str, str]] = Pairwise.shown | {"chosen_logp": "chosen_logps", "rejected_logp": "rejected_logps"}

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundDPO":
        """Choose how this model, and a live reference, are run.

        Raises:
            PackedBatchError: a model does not keep the completions of a row apart.
            AdapterError: virtual tokens that a model cannot be given, or `adapter_off` without an adapter.
            LossError: a live reference that is missing, not asked for, or the model itself.
        """
        return _BoundDPO(self.settings, self.reference, model, device)


class _BoundDPO:
    def __init__(self, settings: DPOSettings, live: nn.Module | None, model: nn.Module, device: torch.device) -> None:
        self.settings = settings
        self.policy = Completions(model, device=device)
        self.reference = Reference(settings.reference, self.policy, live)
        self.mean = Mean(settings.normalize, per_token="sft" in settings.loss_type)
        self.needs = self.mean.needs

    def measure(self, batch: PreferenceBatch) -> Sequence[float]:
        return self.mean.measure(len(batch.groups.group_sizes), chosen_tokens(batch.groups))

    def __call__(self, batch: PreferenceBatch, totals: Sequence[float]) -> LossTerms:
        check_pairs(batch)
        policy = self._logps(self.policy.tokens(batch.groups), batch)
        terms = self._terms(batch, policy, self._reference(batch), self.mean.tokens_per_term(totals))
        return self.mean(terms, totals)

    def at_start(self, batch: PreferenceBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `check_reference` compares: (terms[P], terms[P] at ratio 0, nats[P] by which a side is off)."""
        check_pairs(batch)
        policy, reference = self._logps(self.policy.tokens(batch.groups), batch), self._reference(batch)
        found, expected = (self._terms(batch, policy, other).per_sample for other in (reference, policy))
        assert found is not None
        assert expected is not None
        return found, expected, (policy[0] - reference[0]).abs().view(-1, 2).amax(1)

    def _logps(self, tokens: torch.Tensor, batch: PreferenceBatch) -> list[torch.Tensor]:
        """[logps[2P]], and with `ld_alpha` [logps[2P], tails[2P]]."""
        return [part(tokens, batch.groups) for part in ((whole,) if self.settings.ld_alpha is None else (whole, tails))]

    def _reference(self, batch: PreferenceBatch) -> list[torch.Tensor]:
        if self.reference.kind != "stored":
            return self._logps(self.reference.tokens(batch.groups), batch)
        names = ("ref_logps",) if self.settings.ld_alpha is None else ("ref_logps", "ref_tail_logps")
        return [self.reference.read(getattr(batch, name), name) for name in names]

    def _terms(
        self,
        batch: PreferenceBatch,
        policy: list[torch.Tensor],
        reference: list[torch.Tensor],
        tokens_per_pair: float | None = None,
    ) -> LossTerms:
        chosen_and_rejected, *tail_logps = ((*sides(p), *sides(r)) for p, r in zip(policy, reference, strict=True))
        settings = self.settings
        return dpo(
            *chosen_and_rejected,
            **lengths(batch.groups),
            beta=settings.beta,
            loss_type=settings.loss_type,
            loss_weights=settings.loss_weights,
            label_smoothing=settings.label_smoothing,
            f_divergence=settings.f_divergence,
            f_alpha=settings.f_alpha,
            discopop_tau=settings.discopop_tau,
            ld_alpha=settings.ld_alpha,
            tail_logps=tail_logps[0] if tail_logps else None,
            tokens_per_pair=tokens_per_pair,
        )
