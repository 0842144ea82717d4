"""`forge.distill`: learn another model's distribution over the next token, on rows as for `forge.sft`."""

from __future__ import annotations

from typing import Any

import attrs

import forge_algos
import forge_data
from forge._progress import Reporter
from forge.run._choices import require_same_tokens
from forge.settings._settings import RunSettings
from forge.tasks._offline import Offline
from forge.tasks._task import Run
from forge.verbs._registry import verb
from forge.verbs._sft import SFT


@attrs.frozen(kw_only=True)
class DistillSettings(RunSettings):
    """Every setting of `forge.distill`, grouped by the room that owns it."""

    data: forge_data.DataSettings
    objective: forge_algos.DistillSettings


class Distill(SFT):
    """Come close to a teacher at every learned position."""

    name = "distill"
    settings = DistillSettings
    about = "Distillation: train a model to predict as a larger one does, at the learned tokens of the rows."

    def paths(self, s: Any) -> dict[str, str]:
        """The teacher."""
        return {"teacher_path": s.objective.teacher_path}

    def check(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse a teacher that reads other tokens, and what the lint stops."""
        require_same_tokens(s.model.model_path, "teacher_path", s.objective.teacher_path)
        super().check(s, report, train, held_out)

    def begin(self, run: Run) -> Offline:
        """Make the work with the teacher on the same ranks."""
        own = run.settings.objective
        return Offline(run, forge_algos.Distill(settings=own, teacher=run.load_frozen(own.teacher_path)))


TASK = Distill()
distill = verb(TASK)
