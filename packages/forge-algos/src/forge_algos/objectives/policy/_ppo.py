"""Proximal policy optimisation: each token is an action, weighed beside the value head."""

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from forge_algos.batches._online import OnlineBatch
from forge_algos.heads._completions import to_float32
from forge_algos.heads._value_head import require_value_head, values_at
from forge_algos.losses import LossTerms, value
from forge_algos.objectives.policy._online import BoundOnline, OnlineObjective
from forge_algos.settings._online import PPOSettings


class PPO(OnlineObjective[PPOSettings]):
    """PPO (arXiv 1707.06347, equation 9): the clipped ratio times GAE's advantage; a value loss.

    The value loss is weighed by `value_weight`. Terms are tokens. Policy and value head share the model and one forward. The KL
    to the reference is part of the rewards, and so of the advantages.
    """

    further: ClassVar[tuple[str, ...]] = ("value_loss", "value_error", "value_clipped")
    wanted: ClassVar[tuple[str, ...]] = ("returns", "old_values")

    def __init__(self, settings: PPOSettings | None = None) -> None:
        """Take the settings; None takes their defaults."""
        super().__init__(PPOSettings() if settings is None else settings, PPOSettings)

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundOnline:
        """Choose how this model's head is scored.

        Raises:
            PackedBatchError: the model does not keep a row's documents apart.
            AdapterError: virtual tokens that the model cannot be given, or no value head (`attach_value_head`).
        """
        require_value_head(model)
        return super().bind(model, device=device)

    def loss_options(self, batch: OnlineBatch, device: torch.device) -> dict[str, Any]:
        """Return the clip, and the bound of the ratio where the advantage is negative."""
        return super().loss_options(batch, device) | {"dual_clip": self.settings.dual_clip}

    def terms(self, bound: BoundOnline, batch: OnlineBatch) -> LossTerms:
        """Compute the policy's and the value head's terms in one forward."""
        logps, entropy, values = bound.forward(batch, partial(values_at, bound.model))
        terms = bound.policy(batch, logps, entropy)
        assert values is not None and batch.old_values is not None and batch.returns is not None  # noqa: PT018  checked
        values_loss = value(
            values,
            to_float32(batch.old_values, bound.device),
            to_float32(batch.returns, bound.device),
            clip=self.settings.value_clip,
        )
        return LossTerms(
            terms.sum + self.settings.value_weight * values_loss.sum,
            terms.count,
            {
                **terms.stats,
                "value_loss": values_loss.sum.detach(),
                "value_error": values_loss.stats["squared_error"],
                "value_clipped": values_loss.stats["clipped"],
            },
        )
