"""`forge.orpo`: odds-ratio preference optimisation on pairs of answers, without a reference."""

from __future__ import annotations

import attrs

import forge_algos
import forge_data
from forge.settings._settings import RunSettings
from forge.tasks._preferences import Preferences
from forge.tasks._task import Run
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class ORPOSettings(RunSettings):
    """Every setting of `forge.orpo`, grouped by the room that owns it."""

    data: forge_data.PreferenceDataSettings
    objective: forge_algos.ORPOSettings


class ORPO(Preferences):
    """Imitate the chosen answer, and prefer it by its odds."""

    name = "orpo"
    settings = ORPOSettings
    about = "Odds-ratio preference optimisation: imitate the chosen of two answers and prefer it, without a reference model."

    def objective(self, run: Run) -> forge_algos.Objective:
        """ORPO."""
        return forge_algos.ORPO(run.settings.objective)


TASK = ORPO()
orpo = verb(TASK)
