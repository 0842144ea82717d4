"""Rows of verbs that sample their own completions: prompts, with other fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import forge_data
from forge._counted import counted
from forge.tasks._task import Task

if TYPE_CHECKING:
    from pathlib import Path

    import forge_packing
    from forge._progress import Reporter


class PromptTask(Task):
    """Task that samples completions of prompts."""

    items_are = "prompts"
    samples_are = "completions"
    step_is: ClassVar[str] = "step"
    """What prompts are sampled for: an optimizer step, or a rollout."""

    def row_kind(self, s: Any) -> dict[str, Any]:  # noqa: ARG002 - the same for all settings
        """Say that rows are prompts."""
        return {"prompts": True}

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:  # noqa: ARG002 - prompts are few
        """Tokenize prompts; the other fields of a row stay columns."""
        return forge_data.prepare_prompts(
            path,
            tokenizer,
            directory,
            **self.reading(s),
            max_bad_rows=s.data.max_bad_rows,
            max_prompt_len=s.data.max_prompt_len,
            on_overflow=s.data.on_overflow,
            chat_template=s.data.chat_template,
            chat_template_kwargs=s.data.chat_template_kwargs,
            system_prompt=s.data.system_prompt,
            media=self.media,
            **more,
        )

    def open_store(self, directory: Path) -> Any:
        """Open the store of prompts."""
        return forge_data.PromptStore.open(directory)

    def plan_summary(self, plan: forge_packing.BatchPlan, *, divided: bool = True) -> str:  # noqa: ARG002 - only prompts are divided
        """Describe the steps or rollouts; their tokens are known once they are sampled."""
        number = f"without end, {self.step_is}s" if plan.endless else counted(plan.num_steps, f"{self.step_is}s")
        return f"{number} of at most {counted(plan.batch_size, 'prompts')}"
