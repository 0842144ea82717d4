"""Simple preference optimisation: a row of pairs → the loss of how much likelier a token of the chosen completion is."""

from collections.abc import Sequence

import attrs
import torch
from torch import nn

from forge_algos.heads._completions import Completions, whole
from forge_algos.losses import LossTerms, simpo
from forge_algos.objectives._mean import Mean
from forge_algos.objectives.preference._pairs import Pairwise, PreferenceBatch, check_pairs, lengths, sides
from forge_algos.settings._preference import SimPOSettings


@attrs.frozen
class SimPO(Pairwise):
    """-log σ(β(log π(chosen)/|chosen| - log π(rejected)/|rejected|) - γ) (arXiv 2405.14734, equation 6).

    One forward a row; no reference. Batches are `PreferenceBatch`; no pair's term depends on another, so the gradients do not
    depend on how a step is cut. The reward that the figures show is β times the log-probability a token.
    """

    settings: SimPOSettings = attrs.field(factory=SimPOSettings)

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundSimPO":
        """Choose how this model is run.

        Raises:
            PackedBatchError: the model does not keep the completions of a row apart.
            AdapterError: virtual tokens that the model cannot be given.
        """
        return _BoundSimPO(self.settings, model, device)


class _BoundSimPO:
    def __init__(self, settings: SimPOSettings, model: nn.Module, device: torch.device) -> None:
        self.settings = settings
        self.policy = Completions(model, device=device)
        self.mean = Mean(settings.normalize)
        self.needs = self.mean.needs

    def measure(self, batch: PreferenceBatch) -> Sequence[float]:
        return self.mean.measure(len(batch.groups.group_sizes))

    def __call__(self, batch: PreferenceBatch, totals: Sequence[float]) -> LossTerms:
        check_pairs(batch)
        terms = simpo(
            *sides(whole(self.policy.tokens(batch.groups), batch.groups)),
            **lengths(batch.groups),
            beta=self.settings.beta,
            gamma=self.settings.gamma,
            label_smoothing=self.settings.label_smoothing,
        )
        return self.mean(terms, totals)
