"""Reward models: the Bradley-Terry loss of two scalars, at each completion's last token."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn

from forge_algos.batches._copies import to_device
from forge_algos.heads._completions import GroupModel, to_float32
from forge_algos.heads._scalar_head import choose_scalar_head
from forge_algos.losses import LossTerms, reward
from forge_algos.objectives._mean import Mean
from forge_algos.objectives.preference._pairs import Pairwise, PreferenceBatch, check_pairs, sides
from forge_algos.settings._preference import RewardSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen
class Reward(Pairwise):
    """Reward model: -log σ(r(chosen) - r(rejected) - m) + λ(r(chosen) + r(rejected))².

    The terms are those of arXiv 2203.02155, 2307.09288 (m) and 2312.09244 (λ). The model is a sequence classifier with one
    label. One forward a row; batches are `PreferenceBatch`, whose `margins` are m where they are given. No pair's term depends
    on another, so the gradients do not depend on how a step is cut.
    """

    settings: RewardSettings = attrs.field(factory=RewardSettings, validator=settings_of(RewardSettings))

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide as every objective on pairs, and add `mean_reward` over both sides.
        `centering` pulls it towards 0.
        """
        mean = (sums["chosen_rewards"] + sums["rejected_rewards"]) / (2 * count)
        return {**Pairwise.figures(self, sums, count), "mean_reward": mean}

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundReward":
        """Test that this model gives one number, and choose how it is read.

        Raises:
            LossError: the model is no sequence classifier with one label.
            PackedBatchError: it does not keep the completions of a row apart.
            AdapterError: virtual tokens that the model cannot be given.
        """
        return _BoundReward(self.settings, model, device)


class _BoundReward:
    def __init__(self, settings: RewardSettings, model: nn.Module, device: torch.device) -> None:
        self.settings = settings
        self.head = choose_scalar_head(model, device=device)
        self.rows = GroupModel(model, device=device)
        self.mean = Mean(settings.normalize)
        self.needs = self.mean.needs

    def measure(self, batch: PreferenceBatch) -> Sequence[float]:
        return self.mean.measure(len(batch.groups.group_sizes))

    def __call__(self, batch: PreferenceBatch, totals: Sequence[float]) -> LossTerms:
        check_pairs(batch)
        device = self.rows.device
        ends = to_device(batch.groups.ends, device)
        chosen, rejected = sides(self.head.scores(self.rows.inputs(batch.groups), ends))
        margins = None if batch.margins is None else to_float32(batch.margins, device)
        return self.mean(reward(chosen, rejected, margin=margins, centering=self.settings.centering), totals)
