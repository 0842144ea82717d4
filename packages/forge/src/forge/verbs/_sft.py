"""`forge.sft`: supervised fine-tuning on conversations, prompts with completions, or tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
from forge.settings._settings import RunSettings
from forge.tasks._lint_check import check_kind, check_lint
from forge.tasks._offline import OfflineSteps
from forge.tasks._task import Run, Task
from forge.tasks.items._samples import Samples
from forge.verbs._registry import verb

if TYPE_CHECKING:
    from forge._progress import Reporter


@attrs.frozen(kw_only=True)
class SFTSettings(RunSettings):
    """Settings of `forge.sft`."""

    data: forge_data.DataSettings
    objective: forge_algos.SupervisedSettings


class SFT(Task):
    """Cross-entropy of the learned tokens of every row."""

    name = "sft"
    settings = SFTSettings
    about = "Supervised fine-tuning: train a model on conversations, prompts with completions, or tokens."

    def items(self, s: Any, store: Any) -> Samples:  # noqa: ARG002 - the same for all settings
        """Plan each row as one sample."""
        return Samples(store)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse rows of another kind, and what the lint stops."""
        for store in filter(None, (train, held_out)):
            check_kind(self.name, store, "supervised", "rows to imitate: messages, prompt and completion, documents, or tokens")
        check_lint(s, report, train, held_out)

    def step_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan, with the cross-entropy loss of `forge_algos.SFT`."""
        return OfflineSteps(run, forge_algos.SFT(run.settings.objective))


sft = verb(SFT())
