"""`forge.sdft`: learn from demonstrations without imitating them, taught by oneself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
import forge_packing
from forge._errors import SettingsError
from forge.settings._settings import RunSettings
from forge.tasks._self_samples import RehearsedSelfSamples, SelfSampleSteps
from forge.tasks._task import Run, Task
from forge.tasks.items._demonstrations import Demonstrations
from forge.verbs._registry import verb

if TYPE_CHECKING:
    from pathlib import Path

    from forge._progress import Reporter

SPLIT = "forge.tasks.items._demonstrations:split_answer"
"""Function that takes conversations apart, as `preprocess` names one."""


@attrs.frozen(kw_only=True)
class SDFTSettings(RunSettings):
    """Settings of `forge.sdft`."""

    data: forge_data.PromptDataSettings
    objective: forge_algos.SDFTSettings

    def check(self) -> None:
        """Refuse what samples from another model than the one that learns, or has no average."""
        super().check()
        if self.plan.max_tokens is not None:
            raise SettingsError(
                f"max_tokens={self.plan.max_tokens} has no effect here: how many tokens are learned is known only once "
                "completions are sampled. Give max_steps or num_epochs."
            )
        if self.optimizer.optimizer == "schedule_free":
            raise SettingsError(
                "optimizer=schedule_free trains another model than the one that samples the completions: take another."
            )
        if self.objective.teacher == "ema" and self.strategy.strategy.startswith("zero"):
            raise SettingsError(
                f"teacher=ema with strategy={self.strategy.strategy}: DeepSpeed holds the weights in a buffer of its own, in "
                "which they cannot be exchanged for their average. Take strategy=fsdp2, or teacher=initial."
            )


class SDFT(Task):
    """Divergence from the model itself, shown the demonstration, on its own samples."""

    name = "sdft"
    settings = SDFTSettings
    about = (
        "Self-distillation: learn from demonstrations on the model's own samples, taught by itself with them in its context."
    )
    items_are = "prompts"

    def check_rows(self, s: Any, setting: str) -> None:
        """Look at the first row of each file."""
        forge_data.check_first_row(
            getattr(s.data, setting),
            prompts=True,
            rename_columns=s.data.rename_columns,
            on_bad_row=s.data.on_bad_row,
            preprocess=s.data.preprocess or SPLIT,
        )

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:  # noqa: ARG002 - prompts are few
        """Tokenize what the student is asked; the demonstration stays a column."""
        return forge_data.prepare_prompts(
            path,
            tokenizer,
            directory,
            preprocess=s.data.preprocess or SPLIT,
            rename_columns=s.data.rename_columns,
            on_bad_row=s.data.on_bad_row,
            max_bad_rows=s.data.max_bad_rows,
            max_prompt_len=s.data.max_prompt_len,
            on_overflow=s.data.on_overflow,
            chat_template=s.data.chat_template,
            chat_template_kwargs=s.data.chat_template_kwargs,
            **more,
        )

    def open_store(self, directory: Path) -> Any:
        """Open the store of prompts."""
        return forge_data.PromptStore.open(directory)

    def items(self, s: Any, store: Any) -> Demonstrations:
        """Plan prompts with their demonstrations."""
        return Demonstrations(store, template=s.objective.demonstration_template, max_new_tokens=s.objective.max_new_tokens)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Accept all rows: demonstrations are checked as they are read."""

    def plan_summary(self, plan: forge_packing.BatchPlan, *, divided: bool = True) -> str:  # noqa: ARG002 - only prompts are divided
        """Describe the steps; their tokens are known once they are sampled."""
        number = "without end, steps" if plan.endless else f"{plan.num_steps:,} steps"
        return f"{number} of at most {plan.batch_size:,} prompts"

    def rehearsal_source(self, run: Run) -> RehearsedSelfSamples:
        """Make up completions: what a model without numbers samples has none."""
        return RehearsedSelfSamples(run)

    def step_source(self, run: Run) -> SelfSampleSteps:
        """Sample at each step, and learn from the teacher at each token."""
        return SelfSampleSteps(run)


sdft = verb(SDFT())
