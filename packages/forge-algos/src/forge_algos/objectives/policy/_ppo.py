"""Proximal policy optimisation: each token is an action, weighed by how much more came of it than the value head expected."""

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import nn

from forge_algos.batches._online import OnlineBatch
from forge_algos.heads._completions import numbers
from forge_algos.heads._value_head import require_value_head, values_at
from forge_algos.losses import LossTerms, value
from forge_algos.objectives.policy._online import BoundOnline, Online
from forge_algos.settings._online import PPOSettings


class PPO(Online):
    """The clipped ratio times GAE's advantage, plus `value_weight` times the clipped value loss (arXiv 1707.06347, equation 9).

    Terms are tokens. Policy and value head share one forward and the model beneath; the KL to the reference is in the rewards
    already, and so in the advantages.
    """

    kind = "ppo"
    unit = "tokens"
    further: ClassVar[tuple[str, ...]] = ("value_loss", "value_error", "value_clipped")
    wanted: ClassVar[tuple[str, ...]] = ("returns", "old_values")

    def __init__(self, settings: PPOSettings | None = None) -> None:
        """With no settings, their defaults."""
        self.settings = settings or PPOSettings()
        self.kl_weight = self.settings.kl_weight

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundOnline:
        """Choose how the head is scored.

        Raises:
            PackedBatchError: the model does not keep a row's documents apart.
            AdapterError: virtual tokens that it cannot be given, or no value head (`attach_value_head`).
        """
        require_value_head(model)
        return _BoundPPO(self, model, device=device)


class _BoundPPO(BoundOnline):
    def __init__(self, objective: PPO, model: nn.Module, *, device: torch.device) -> None:
        super().__init__(objective, model, temperature=objective.settings.temperature, device=device)
        self._settings = objective.settings
        self._values = partial(values_at, model)

    def __call__(self, batch: OnlineBatch, totals: Sequence[float] = ()) -> LossTerms:  # noqa: ARG002  the protocol's
        logps, entropy, values = self.forward(batch, self._values)
        s = self._settings
        terms = self.policy(batch, logps, entropy, clip=s.clip, clip_high=s.clip_high)
        assert values is not None and batch.old_values is not None and batch.returns is not None  # noqa: PT018  checked
        values_loss = value(
            values, numbers(batch.old_values, self.device), numbers(batch.returns, self.device), clip=s.value_clip
        )
        return LossTerms(
            terms.sum + s.value_weight * values_loss.sum,
            terms.count,
            {
                **terms.stats,
                "value_loss": values_loss.sum.detach(),
                "value_error": values_loss.stats["squared_error"],
                "value_clipped": values_loss.stats["clipped"],
            },
        )
