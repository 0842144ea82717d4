"""REINFORCE with a leave-one-out baseline: each completion is one action, weighed against the others of its prompt."""

from collections.abc import Sequence

import torch
from torch import nn

from forge_algos.batches._online import OnlineBatch
from forge_algos.losses import LossTerms
from forge_algos.objectives.policy._online import BoundOnline, Online
from forge_algos.settings._online import RLOOSettings


class RLOO(Online):
    """The clipped ratio of whole completions, times their advantage; the KL to the reference is in the reward already.

    Terms are completions (`losses.policy_gradient`, kind rloo; arXiv 2402.14740).
    """

    kind = "rloo"
    unit = "completions"

    def __init__(self, settings: RLOOSettings | None = None) -> None:
        """With no settings, their defaults."""
        self.settings = settings or RLOOSettings()
        self.kl_weight = self.settings.kl_weight

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundOnline:
        """Choose how the head is scored.

        Raises:
            PackedBatchError: the model does not keep a row's documents apart.
            AdapterError: virtual tokens that it cannot be given.
        """
        return _BoundRLOO(self, model, device=device)


class _BoundRLOO(BoundOnline):
    def __init__(self, objective: RLOO, model: nn.Module, *, device: torch.device) -> None:
        super().__init__(objective, model, temperature=objective.settings.temperature, device=device)
        self._settings = objective.settings

    def __call__(self, batch: OnlineBatch, totals: Sequence[float] = ()) -> LossTerms:  # noqa: ARG002  the protocol's
        logps, entropy, _ = self.forward(batch)
        return self.policy(batch, logps, entropy, clip=self._settings.clip, clip_high=self._settings.clip_high)
