"""Supervised fine-tuning: a packed row → the summed negative log-likelihood of its learned tokens."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn

from forge_algos.batches._packed import PackedBatch
from forge_algos.heads._head import choose_head
from forge_algos.heads._neftune import noisy_embeddings, require_embeddings
from forge_algos.heads._packable import require_packable
from forge_algos.losses import LossTerms
from forge_algos.objectives._mean import Mean
from forge_algos.objectives._packed import LearnedTokens, RowLoader
from forge_algos.settings._supervised import SupervisedSettings


@attrs.frozen
class SFT(LearnedTokens):
    """Each learned token is predicted from the tokens before it in its own document, and only from those.

    The forward gets `use_cache=False`, no mask, positions that start anew in each document, and `cu_seq_lens_q/k` (int32
    [B+1]) with `max_length_q/k`, which variable-length attention reads; sdpa and eager go by the positions.
    """

    settings: SupervisedSettings = attrs.field(factory=SupervisedSettings)

    @property
    def stats(self) -> tuple[str, ...]:
        """How many targets were the likeliest token; and the plain negative log-likelihood, where the loss is something else."""
        s = self.settings
        plain = s.loss == "nll" and not s.label_smoothing and not s.z_loss and s.normalize == "global"
        return ("correct",) if plain else ("correct", "nll")

    def figures(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Means over learned tokens: `accuracy`, and `nll` (plain, in nats) where the loss is something else."""
        names = {"correct": "accuracy", "nll": "nll"}
        return {names[stat]: sums[stat] / count for stat in self.stats}

    def bind(self, model: nn.Module, *, device: torch.device) -> "BoundSFT":
        """Choose how this model's head is scored (`forge_algos.objectives.choose_head` says why), then run batches.

        Raises:
            PackedBatchError: the model does not keep the documents of a packed row apart; two made-up ones are tried.
            AdapterError: virtual tokens that the model cannot be given.
            LossError: noise is asked for, and the model names no embeddings to put it on.
        """
        require_packable(model, device=device)
        if self.settings.neftune_alpha:
            require_embeddings(model)
        return BoundSFT(self.settings, model, device)


class BoundSFT:
    """`SFT` on a model."""

    def __init__(self, settings: SupervisedSettings, model: nn.Module, device: torch.device) -> None:
        """Choose the head's scoring."""
        self.head = choose_head(model, device=device)
        self._settings = settings
        self._mean = Mean(settings.normalize)
        self._load = RowLoader(model, device)
        self.needs = self._mean.needs

    def measure(self, batch: PackedBatch) -> Sequence[float]:
        """What the mean of means divides by."""
        return self._mean.measure(LearnedTokens().count(batch))

    def __call__(self, batch: PackedBatch, totals: Sequence[float]) -> LossTerms:
        """The row's terms; noise on its embeddings where the model is in training mode."""
        row, s = self._load(batch), self._settings
        with noisy_embeddings(self.head.model, s.neftune_alpha, row.inputs["cu_seq_lens_q"]):
            terms = self.head.nll(
                row.inputs, row.rows, row.targets, dft=s.loss == "dft", label_smoothing=s.label_smoothing, z_loss=s.z_loss
            )
        return self._mean(terms, totals)
