"""`forge.simpo`: simple preference optimisation on pairs of answers, by log-probabilities a token, without a reference."""

from __future__ import annotations

import attrs

import forge_algos
import forge_data
from forge.settings._settings import RunSettings
from forge.tasks._preferences import Preferences
from forge.tasks._task import Run
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class SimPOSettings(RunSettings):
    """Every setting of `forge.simpo`, grouped by the room that owns it."""

    data: forge_data.PreferenceDataSettings
    objective: forge_algos.SimPOSettings


class SimPO(Preferences):
    """Prefer the chosen answer by its likelihood a token."""

    name = "simpo"
    settings = SimPOSettings
    about = (
        "Simple preference optimisation: prefer the chosen of two answers by its likelihood a token, without a reference model."
    )

    def objective(self, run: Run) -> forge_algos.Objective:
        """SimPO."""
        return forge_algos.SimPO(run.settings.objective)


TASK = SimPO()
simpo = verb(TASK)
