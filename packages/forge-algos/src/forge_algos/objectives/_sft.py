"""Supervised fine-tuning: summed negative log-likelihood of a packed row's learned tokens."""

from collections.abc import Mapping

import attrs
import torch
from torch import nn

from forge_algos.batches._learned import LearnedRow
from forge_algos.heads._head import Head
from forge_algos.heads._neftune import noisy_embeddings, require_embeddings
from forge_algos.losses import LossTerms
from forge_algos.objectives._tokens import BoundTokens, TokenObjective
from forge_algos.settings._supervised import SupervisedSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen
class SFT(TokenObjective):
    """Supervised fine-tuning: learned tokens are predicted from those before in their document."""

    settings: SupervisedSettings = attrs.field(factory=SupervisedSettings, validator=settings_of(SupervisedSettings))

    @property
    def stats(self) -> tuple[str, ...]:
        """`correct` (targets that were the likeliest token), and plain `nll` beside another loss."""
        s = self.settings
        plain = s.loss == "nll" and not s.label_smoothing and not s.z_loss and s.normalize == "global"
        return ("correct",) if plain else ("correct", "nll")

    @property
    def normalize(self) -> str:
        """The settings' own."""
        return self.settings.normalize

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide by the number of learned tokens: `accuracy`, and plain `nll` beside another loss."""
        names = {"correct": "accuracy", "nll": "nll"}
        return {names[stat]: sums[stat] / count for stat in self.stats}

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundTokens:
        """Choose how this model's head is scored; `objectives.choose_head` gives the reason.

        Raises:
            PackedBatchError: the model does not keep the documents of a packed row apart, tried on two made-up ones.
            AdapterError: virtual tokens that the model cannot be given.
            LossError: noise is asked for, and the model names no embeddings to put it on.
        """
        if self.settings.neftune_alpha:
            require_embeddings(model)
        return TokenObjective.bind(self, model, device=device)

    def terms(self, head: Head, row: LearnedRow) -> LossTerms:
        """Compute the row's loss, with noise on its embeddings where the model is in training mode."""
        s = self.settings
        with noisy_embeddings(head.model, s.neftune_alpha, row.boundaries):
            terms = head.nll(
                row.inputs,
                row.rows,
                row.targets,
                weights=row.weights,
                dft=s.loss == "dft",
                label_smoothing=s.label_smoothing,
                z_loss=s.z_loss,
            )
        # Known beforehand, so that nothing waits for the device.
        return terms._replace(count=row.count)
