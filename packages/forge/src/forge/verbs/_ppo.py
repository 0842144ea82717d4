"""`forge.ppo`: Proximal policy optimisation: train a model on rewards of its own completions, with a value head."""

from __future__ import annotations

from typing import Any

import attrs

import forge_algos
import forge_data
from forge.tasks._online import OnlineRunSettings, OnlineTask
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class PPOSettings(OnlineRunSettings):
    """Every setting of `forge.ppo`, grouped by the room that owns it."""

    data: forge_data.PromptDataSettings
    objective: forge_algos.PPOSettings


class PPO(OnlineTask):
    """train a model on rewards of its own completions, with a value head."""

    name = "ppo"
    settings = PPOSettings
    about = "Proximal policy optimisation: train a model on rewards of its own completions, with a value head."

    additions = ("value_head",)

    def extend(self, model: Any, s: Any) -> None:  # noqa: ARG002 - the same for all settings
        """Put the value head on the model."""
        forge_algos.online.attach_value_head(model)

    def objective(self, settings: forge_algos.PPOSettings) -> forge_algos.Objective:
        """The objective on rollouts."""
        return forge_algos.PPO(settings)


TASK = PPO()
ppo = verb(TASK)
