"""Group-relative policy optimisation and its variants: completions of one prompt, each weighed by how much better it was."""

from collections.abc import Sequence

import torch
from torch import nn

from forge_algos.batches._online import OnlineBatch
from forge_algos.heads._completions import numbers
from forge_algos.losses import LossTerms
from forge_algos.losses.policy._policy import TOKEN_MEANS
from forge_algos.objectives.policy._online import BoundOnline, Online
from forge_algos.settings._online import GRPOSettings


class GRPO(Online):
    """The clipped ratio to the policy that sampled, times the group's advantage, plus `kl_weight` times k3 to the reference.

    grpo and dr_grpo count completions, dapo and bnpo tokens (`losses.policy_gradient`). Advantages come with the batch: what
    couples a group's completions is settled before anything is cut.
    """

    def __init__(self, settings: GRPOSettings | None = None) -> None:
        """With no settings, their defaults."""
        self.settings = settings or GRPOSettings()
        self.kind = self.settings.loss_type
        self.unit = "tokens" if self.kind in TOKEN_MEANS else "completions"
        self.kl_weight = self.settings.kl_weight

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundOnline:
        """Choose how the head is scored.

        Raises:
            PackedBatchError: the model does not keep a row's documents apart.
            AdapterError: virtual tokens that it cannot be given.
        """
        return _BoundGRPO(self, model, device=device)


class _BoundGRPO(BoundOnline):
    def __init__(self, objective: GRPO, model: nn.Module, *, device: torch.device) -> None:
        super().__init__(objective, model, temperature=objective.settings.temperature, device=device)
        self._settings = objective.settings

    def __call__(self, batch: OnlineBatch, totals: Sequence[float] = ()) -> LossTerms:  # noqa: ARG002  the protocol's
        logps, entropy, _ = self.forward(batch)
        s = self._settings
        reference = numbers(batch.ref_logps, self.device) if s.kl_weight and batch.ref_logps is not None else None
        return self.policy(
            batch,
            logps,
            entropy,
            clip=s.clip,
            clip_high=s.clip_high,
            max_length=s.max_new_tokens if s.loss_type == "dr_grpo" else None,
            ref_logps=reference,
            kl_weight=s.kl_weight,
        )
