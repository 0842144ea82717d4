"""Pretraining: summed negative log-likelihood of the tokens of blocks, in packed rows."""

from collections.abc import Mapping

import attrs
import torch
from torch import nn

from forge_algos.objectives._sft import SFT
from forge_algos.objectives._tokens import BoundTokens, LearnedTokens
from forge_algos.settings._supervised import PretrainSettings, SupervisedSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen
class Pretrain(LearnedTokens):
    """Pretraining: each token but a document's first is predicted from those before in a block.

    Loss and batches are those of `SFT`. What the documents of a row are is decided where rows are packed
    (`forge_packing.split_documents`): pieces of documents, each a sample of its own whose first label is -100, or with
    `cross_documents` whole blocks, each one sample. So the terms are those of the blocks, in whatever rows these lie.
    """

    settings: PretrainSettings = attrs.field(factory=PretrainSettings, validator=settings_of(PretrainSettings))

    @property
    def stats(self) -> tuple[str, ...]:
        """As `SFT.stats`."""
        return self._sft().stats

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide as `SFT.figures` does."""
        return self._sft().figures(sums, count)

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundTokens:
        """Choose how this model's head is scored, as `SFT.bind` does."""
        return self._sft().bind(model, device=device)

    def _sft(self) -> SFT:
        return SFT(SupervisedSettings(label_smoothing=self.settings.label_smoothing, z_loss=self.settings.z_loss))
