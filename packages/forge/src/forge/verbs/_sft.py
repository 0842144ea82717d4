"""`forge.sft`: supervised fine-tuning on conversations, prompts with completions, or tokens."""

from __future__ import annotations

from typing import Any

import attrs

import forge_algos
import forge_data
from forge._progress import Reporter
from forge.settings._settings import RunSettings
from forge.tasks._lint_check import check_data, check_kind
from forge.tasks._offline import Offline
from forge.tasks._task import Run, Task
from forge.tasks.items._samples import Samples
from forge.verbs._registry import verb


@attrs.frozen(kw_only=True)
class SFTSettings(RunSettings):
    """Every setting of `forge.sft`, grouped by the room that owns it."""

    data: forge_data.DataSettings
    objective: forge_algos.SupervisedSettings


class SFT(Task):
    """Imitate the learned tokens of every row."""

    name = "sft"
    settings = SFTSettings
    about = "Supervised fine-tuning: train a model on conversations, prompts with completions, or tokens."

    def items(self, s: Any, store: Any) -> Samples:  # noqa: ARG002 - the same for all settings
        """Plan each sample by itself."""
        return Samples(store)

    def check(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse rows that are not to be imitated, and what the lint stops."""
        for store in filter(None, (train, held_out)):
            check_kind(self.name, store, "supervised", "rows to imitate: messages, prompt and completion, documents, or tokens")
        check_data(s, report, train, held_out)

    def begin(self, run: Run) -> Offline:
        """Make the work of plain imitation."""
        return Offline(run, forge_algos.SFT(run.settings.objective))


TASK = SFT()
sft = verb(TASK)
