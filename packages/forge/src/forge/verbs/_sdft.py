"""`forge.sdft`: learn from demonstrations without imitating them, taught by oneself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
from forge._errors import SettingsError
from forge.settings._settings import RunSettings
from forge.tasks._media import check_prompt_media, has_media, media_inputs, with_media
from forge.tasks._self_samples import RehearsedSelfSamples, SelfSampleSteps
from forge.tasks._task import Run
from forge.tasks.items._demonstrations import Demonstrations
from forge.verbs._prompts import PromptTask
from forge.verbs._registry import verb

if TYPE_CHECKING:
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


class SDFT(PromptTask):
    """Divergence from the model itself, shown the demonstration, on its own samples."""

    name = "sdft"
    settings = SDFTSettings
    media = True
    about = (
        "Self-distillation: learn from demonstrations on the model's own samples, taught by itself with them in its context."
    )

    def preprocess(self, s: Any) -> str:
        """Take the demonstration out of the conversation, where the user's function does not."""
        return s.data.preprocess or SPLIT

    def items(self, s: Any, store: Any) -> Demonstrations:
        """Plan prompts with their demonstrations."""
        own = s.objective
        placeholders = media_inputs(s).placeholders if has_media(store) else ()
        return Demonstrations(
            store, template=own.demonstration_template, max_new_tokens=own.max_new_tokens, placeholders=placeholders
        )

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse settings that images cannot have; demonstrations are checked as they are read."""
        check_prompt_media(s, report, train, held_out)

    def rehearsal_source(self, run: Run) -> RehearsedSelfSamples:
        """Make up completions: what a model without numbers samples has none."""
        return RehearsedSelfSamples(run)

    def step_source(self, run: Run) -> SelfSampleSteps:
        """Sample at each step, and learn from the teacher at each token."""
        return SelfSampleSteps(with_media(run))


sdft = verb(SDFT())
