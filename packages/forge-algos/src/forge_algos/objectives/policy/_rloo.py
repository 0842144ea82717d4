"""REINFORCE with a leave-one-out baseline: each completion is one action."""

from forge_algos.objectives.policy._online import OnlineObjective
from forge_algos.settings._online import RLOOSettings


class RLOO(OnlineObjective[RLOOSettings]):
    """RLOO (arXiv 2402.14740): the clipped ratio of whole completions times their advantage.

    Terms are completions. The KL to the reference is part of the reward.
    """

    def __init__(self, settings: RLOOSettings | None = None) -> None:
        """Take the settings; None takes their defaults."""
        super().__init__(RLOOSettings() if settings is None else settings, RLOOSettings)
