"""`forge.grpo`: Group-relative policy optimisation: train a model on rewards of its own completions, compared within groups."""

from __future__ import annotations

import attrs

import forge_algos
import forge_data
from forge.tasks._online import OnlineRunSettings, OnlineTask
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class GRPOSettings(OnlineRunSettings):
    """Every setting of `forge.grpo`, grouped by the room that owns it."""

    data: forge_data.PromptDataSettings
    objective: forge_algos.GRPOSettings


class GRPO(OnlineTask):
    """train a model on rewards of its own completions, compared within groups."""

    name = "grpo"
    settings = GRPOSettings
    about = "Group-relative policy optimisation: train a model on rewards of its own completions, compared within groups."

    def objective(self, settings: forge_algos.GRPOSettings) -> forge_algos.Objective:
        """The objective on rollouts."""
        return forge_algos.GRPO(settings)


TASK = GRPO()
grpo = verb(TASK)
