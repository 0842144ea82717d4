"""Simple preference optimisation: how much likelier a token of the chosen completion is."""

import attrs

from forge_algos.losses import LossTerms, simpo
from forge_algos.objectives.preference._pairs import PairObjective, Pairs, PreferenceBatch
from forge_algos.settings._preference import SimPOSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen
class SimPO(PairObjective):
    """SimPO (arXiv 2405.14734, equation 6): -log σ(β(p_c - p_r) - γ), p = log π(y)/|y| a token.

    No reference. With `cpo_alpha` the chosen completion's -log π a token is added (CPO-SimPO), a mean over the tokens of the
    whole step. So the gradients do not depend on how a step is cut. The reward in the figures is β times the log-probability a
    token.
    """

    settings: SimPOSettings = attrs.field(factory=SimPOSettings, validator=settings_of(SimPOSettings))

    @property
    def normalize(self) -> str:
        """The settings' own."""
        return self.settings.normalize

    @property
    def per_token(self) -> bool:
        """Whether there is a likelihood part."""
        return self.settings.cpo_alpha > 0

    def terms(self, pairs: Pairs, batch: PreferenceBatch) -> LossTerms:
        """Compute the loss of each pair from its mean log-probabilities a token."""
        del batch
        s = self.settings
        return simpo(
            pairs.chosen,
            pairs.rejected,
            chosen_lengths=pairs.chosen_lengths,
            rejected_lengths=pairs.rejected_lengths,
            beta=s.beta,
            gamma=s.gamma,
            label_smoothing=s.label_smoothing,
            nll_weight=s.cpo_alpha,
            tokens_per_pair=pairs.tokens_per_pair,
        )
