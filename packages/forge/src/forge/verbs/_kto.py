"""`forge.kto`: Kahneman-Tversky optimisation on single answers that are wanted or not."""

from __future__ import annotations

from typing import Any

import attrs

import forge_algos
import forge_data
from forge._progress import Reporter
from forge.settings._settings import RunSettings
from forge.tasks._lint_check import check_kind
from forge.tasks._preferences import Referred, check_reference, reference_of
from forge.tasks._task import Run
from forge.tasks.items._pairs import Answers
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class KTOSettings(RunSettings):
    """Every setting of `forge.kto`, grouped by the room that owns it."""

    data: forge_data.PreferenceDataSettings
    objective: forge_algos.KTOSettings

    def check(self) -> None:
        """Refuse a reference that cannot be."""
        super().check()
        check_reference(self)


class KTO(Referred):
    """Raise wanted answers above the reference, and lower the others."""

    name = "kto"
    settings = KTOSettings
    about = "Kahneman-Tversky optimisation: learn from single answers that are marked as wanted or not, near a reference model."
    kind = "unpaired_preference"
    needs = "rows of prompt, completion and label (true where the completion is wanted)"

    def items(self, s: Any, store: Any) -> Answers:  # noqa: ARG002 - the same for all settings
        """Plan single answers, some of which are wanted and some not."""
        check_kind(self.name, store, self.kind, self.needs)
        return Answers(store)

    def check(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse answers that are all wanted, or none, and what the lint stops."""
        forge_data.check_classes(train)
        super().check(s, report, train, held_out)

    def objective(self, run: Run) -> forge_algos.Objective:
        """KTO, with one estimate of the KL a step."""
        return forge_algos.KTO(run.settings.objective, reference=reference_of(run))


TASK = KTO()
kto = verb(TASK)
