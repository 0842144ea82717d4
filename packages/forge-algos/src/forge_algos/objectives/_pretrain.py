"""Pretraining: a packed row of blocks → the summed negative log-likelihood of its tokens."""

from collections.abc import Mapping

import attrs
import torch
from torch import nn

from forge_algos.objectives._packed import LearnedTokens
from forge_algos.objectives._sft import SFT, BoundSFT
from forge_algos.settings._supervised import PretrainSettings, SupervisedSettings


@attrs.frozen
class Pretrain(LearnedTokens):
    """Every token of a document but its first is predicted, from those before it in its block; `SFT`'s loss, and its batches.

    What a row's documents are is the packer's doing (`forge_packing.split_documents`): pieces of documents, each a sample of
    its own whose first label is -100, or with `cross_documents` whole blocks, each one sample. So the terms are those of the
    blocks, in whatever rows these lie.
    """

    settings: PretrainSettings = attrs.field(factory=PretrainSettings)

    @property
    def stats(self) -> tuple[str, ...]:
        """As `SFT.stats`."""
        return self._sft().stats

    def figures(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """As `SFT.figures`."""
        return self._sft().figures(sums, count)

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundSFT:
        """As `SFT.bind`."""
        return self._sft().bind(model, device=device)

    def _sft(self) -> SFT:
        return SFT(SupervisedSettings(label_smoothing=self.settings.label_smoothing, z_loss=self.settings.z_loss))
