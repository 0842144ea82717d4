"""`forge.dpo`: direct preference optimisation on pairs of answers."""

from __future__ import annotations

import attrs

import forge_algos
import forge_data
from forge.settings._settings import RunSettings
from forge.tasks._preferences import Referred, check_reference, reference_of
from forge.tasks._task import Run
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class DPOSettings(RunSettings):
    """Every setting of `forge.dpo`, grouped by the room that owns it."""

    data: forge_data.PreferenceDataSettings
    objective: forge_algos.DPOSettings

    def check(self) -> None:
        """Refuse a reference that cannot be."""
        super().check()
        check_reference(self)


class DPO(Referred):
    """Prefer the chosen answer, near the reference."""

    name = "dpo"
    settings = DPOSettings
    about = "Direct preference optimisation: train a model to prefer the chosen of two answers, near a reference model."

    def objective(self, run: Run) -> forge_algos.Objective:
        """DPO, in one of its forms or several."""
        return forge_algos.DPO(run.settings.objective, reference=reference_of(run))


TASK = DPO()
dpo = verb(TASK)
