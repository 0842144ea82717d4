"""`forge.distill`: learn a teacher's distribution over the next token, on rows as for SFT."""

from __future__ import annotations

from typing import Any

import attrs

import forge_algos
import forge_data
from forge.settings._settings import RunSettings
from forge.tasks._offline import OfflineSteps
from forge.tasks._reference_model import require_same_tokens
from forge.tasks._task import Run
from forge.verbs._registry import verb
from forge.verbs._sft import SFT, with_shared_prefixes


@attrs.frozen(kw_only=True)
class DistillSettings(RunSettings):
    """Settings of `forge.distill`."""

    data: forge_data.DataSettings
    objective: forge_algos.DistillSettings


class Distill(SFT):
    """Divergence from a teacher at every learned token."""

    name = "distill"
    settings = DistillSettings
    about = "Distillation: train a model to predict as a larger one does, at the learned tokens of the rows."

    def other_models(self, s: Any) -> dict[str, str]:
        """Return the path of the teacher."""
        return {"teacher_path": s.objective.teacher_path}

    def check_settings(self, s: Any) -> None:
        """Check the teacher, which must have the same vocabulary."""
        super().check_settings(s)
        require_same_tokens(s, "teacher_path", s.objective.teacher_path)

    def rehearsal_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan, with the teacher on the same ranks."""
        own = run.settings.objective
        teacher = run.load_frozen(own.teacher_path)
        return OfflineSteps(with_shared_prefixes(run, run.model, teacher), forge_algos.Distill(settings=own, teacher=teacher))


distill = verb(Distill())
