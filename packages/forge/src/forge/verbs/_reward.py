"""`forge.reward`: a reward model from pairs of answers."""

from __future__ import annotations

from typing import Any

import attrs

import forge_algos
import forge_data
from forge.settings._settings import RunSettings
from forge.tasks._preferences import Preferences
from forge.tasks._task import Run
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class RewardSettings(RunSettings):
    """Every setting of `forge.reward`, grouped by the room that owns it."""

    data: forge_data.PreferenceDataSettings
    objective: forge_algos.RewardSettings


class Reward(Preferences):
    """Give the chosen answer the higher number."""

    name = "reward"
    settings = RewardSettings
    about = "Reward modelling: train a model with a scalar head to give the chosen of two answers the higher reward."
    loads = "reward"

    def probe(self, s: Any) -> forge_algos.Objective:
        """Ask the scalar head, not the language model's."""
        return forge_algos.Reward(s.objective)

    def objective(self, run: Run) -> forge_algos.Objective:
        """Bradley and Terry's model of preferences."""
        return forge_algos.Reward(run.settings.objective)


TASK = Reward()
reward = verb(TASK)
