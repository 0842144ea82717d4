"""`forge.pretrain`: next-token prediction on whole documents, cut into blocks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
from forge._errors import SettingsError
from forge.settings._settings import RunSettings
from forge.tasks._lint_check import check_kind, check_lint
from forge.tasks._offline import OfflineSteps
from forge.tasks._task import Run, Task
from forge.tasks.items._blocks import DocumentBlocks
from forge.verbs._registry import verb

if TYPE_CHECKING:
    from forge._progress import Reporter


@attrs.frozen(kw_only=True)
class PretrainSettings(RunSettings):
    """Settings of `forge.pretrain`."""

    data: forge_data.PretrainDataSettings
    objective: forge_algos.PretrainSettings


class Pretrain(Task):
    """Cross-entropy of every token of every document."""

    name = "pretrain"
    settings = PretrainSettings
    items_are = "blocks"
    about = "Pretraining: train a model on whole documents, text or tokens, every token of them once an epoch."

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:
        """Tokenize documents, of any length and with every token learned."""
        return forge_data.prepare(
            path,
            tokenizer,
            directory,
            format="document",
            train_on="all",
            **self.reading(s),
            max_bad_rows=s.data.max_bad_rows,
            num_proc=s.data.num_proc,
            progress=report.progress("tokenizing"),
            **more,
        )

    def row_kind(self, s: Any) -> dict[str, Any]:  # noqa: ARG002 - the same for all settings
        """Say that rows are documents."""
        return {"format": "document"}

    def items(self, s: Any, store: Any) -> DocumentBlocks:
        """Plan blocks of the documents; refuse rows of another kind."""
        check_kind(self.name, store, "supervised", "documents: text, or tokens")
        if store.weights is not None:
            raise SettingsError(
                "data_path gives weights, and a block of pretraining holds documents of several sources: list the paths "
                "without weights."
            )
        own = s.objective
        return DocumentBlocks(store, block_size=own.block_size, cross_documents=own.cross_documents)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse what the lint stops."""
        check_lint(s, report, train, held_out)

    def step_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan, with the cross-entropy of every token."""
        return OfflineSteps(run, forge_algos.Pretrain(run.settings.objective))


pretrain = verb(Pretrain())
