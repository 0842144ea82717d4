"""`forge.rloo`: REINFORCE with a leave-one-out baseline: train a model on rewards of its own completions."""

from __future__ import annotations

import attrs

import forge_algos
import forge_data
from forge.tasks._online import OnlineRunSettings, OnlineTask
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class RLOOSettings(OnlineRunSettings):
    """Every setting of `forge.rloo`, grouped by the room that owns it."""

    data: forge_data.PromptDataSettings
    objective: forge_algos.RLOOSettings


class RLOO(OnlineTask):
    """train a model on rewards of its own completions."""

    name = "rloo"
    settings = RLOOSettings
    about = "REINFORCE with a leave-one-out baseline: train a model on rewards of its own completions."

    def objective(self, settings: forge_algos.RLOOSettings) -> forge_algos.Objective:
        """The objective on rollouts."""
        return forge_algos.RLOO(settings)


TASK = RLOO()
rloo = verb(TASK)
