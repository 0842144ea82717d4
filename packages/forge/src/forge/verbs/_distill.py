"""`forge.distill`: learn a teacher's distribution over the next token, on rows as for SFT."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
from forge._counted import counted
from forge._errors import SettingsError
from forge.settings._settings import RunSettings
from forge.tasks._lint_check import check_kind
from forge.tasks._offline import OfflineSteps
from forge.tasks._reference_model import require_same_tokens
from forge.tasks._task import Run
from forge.tasks.items._taught import TaughtRows
from forge.verbs._registry import verb
from forge.verbs._sft import SFT, with_shared_prefixes

if TYPE_CHECKING:
    from forge._progress import Reporter

_FEW = 0.5
"""Share of the learned tokens below which the log warns that few can be compared."""


@attrs.frozen(kw_only=True)
class DistillSettings(RunSettings):
    """Settings of `forge.distill`."""

    data: forge_data.DataSettings
    objective: forge_algos.DistillSettings


class Distill(SFT):
    """Divergence from a teacher at every learned token, or at spans of another tokenizer."""

    name = "distill"
    settings = DistillSettings
    about = "Distillation: train a model to predict as a larger one does, at the learned tokens of the rows."

    def other_models(self, s: Any) -> dict[str, str]:
        """Return the path of the teacher."""
        return {"teacher_path": s.objective.teacher_path}

    def check_settings(self, s: Any) -> None:
        """Check the teacher, which must have the same vocabulary where one is assumed."""
        super().check_settings(s)
        own = s.objective
        if own.loss == "jsd":
            require_same_tokens(
                s,
                "teacher_path",
                own.teacher_path,
                otherwise="Or set loss=gold, which compares two models of any two tokenizers.",
            )
        elif s.data.on_overflow == "split":
            raise SettingsError(
                f"on_overflow=split with loss={own.loss}: two tokenizers would cut a row at two places. Take drop, truncate or "
                "error."
            )

    def check_rows(self, s: Any, setting: str) -> None:
        """Refuse files for their first row, one with images too where two tokenizers read it."""
        media = self.media and s.objective.loss == "jsd"
        forge_data.check_first_row(getattr(s.data, setting), media=media, **self.row_kind(s), **self.reading(s))

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:
        """Tokenize rows, with both tokenizers where they may differ; log what both have in common."""
        own = s.objective
        if own.loss == "jsd":
            return super().prepare(s, path, tokenizer, directory, report, **more)
        d = s.data
        store = forge_data.prepare_taught(
            path,
            tokenizer,
            own.teacher_path,
            directory,
            format=d.data_format,
            train_on=d.train_on,
            turns=d.turns,
            chat_template=d.chat_template,
            chat_template_kwargs=d.chat_template_kwargs,
            system_prompt=d.system_prompt,
            turn_end=d.turn_end,
            train_on_turn_end=d.train_on_turn_end,
            max_seq_len=d.max_seq_len,
            on_overflow=d.on_overflow,
            **self.reading(s),
            max_bad_rows=d.max_bad_rows,
            num_proc=d.num_proc,
            progress=report.progress("tokenizing"),
            **more,
        )
        for line in _in_common(store):
            report.note(line)
        return store

    def items(self, s: Any, store: Any) -> Any:
        """Plan samples with their teacher's tokens, where it has others."""
        if s.objective.loss == "jsd":
            return super().items(s, store)
        check_kind(self.name, store, "supervised", "rows to imitate: messages, prompt and completion")
        if not store.span_counts.any():
            raise forge_data.DataError(
                f"{store.source(0)} and the other {len(store) - 1:,} samples that train, or that are held out: of none do both "
                "tokenizers have the same learned text. Set another `validation_split` or `seed`, or give rows that both read "
                "alike"
            )
        return TaughtRows(store)

    def shared(self, s: Any, items: Any) -> dict[str, Any]:
        """Return what samples begin with; nothing where the teacher's begin otherwise."""
        return super().shared(s, items) if s.objective.loss == "jsd" else {}

    def rehearsal_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan, with the teacher on the same ranks."""
        own = run.settings.objective
        teacher = run.load_frozen(own.teacher_path)
        if own.loss == "jsd":
            return OfflineSteps(
                with_shared_prefixes(run, run.model, teacher), forge_algos.Distill(settings=own, teacher=teacher)
            )
        return OfflineSteps(run, forge_algos.AlignedDistill(settings=own, teacher=teacher, shared=_shared(run)))


def _shared(run: Run) -> Any:
    """Return the ids that both vocabularies share, after saying how many; none with loss=uld."""
    own = run.settings.objective
    tokenizers = run.tokenizer, forge_data.load_tokenizer(own.teacher_path)
    shared = forge_data.shared_tokens(*tokenizers, run.train.store.teacher_ends)
    sizes = [len(each) for each in tokenizers]
    share = f"{counted(len(shared[0]), 'tokens')} are in both vocabularies, of {sizes[0]:,} and of the teacher's {sizes[1]:,}"
    if own.loss == "uld":
        run.report.note(f"vocabularies: {share}; loss=uld compares all by their sorted probabilities")
        return tuple(ids[:0] for ids in shared)
    run.report.note(f"vocabularies: {share}; these are compared by a JSD, the others by their sorted probabilities")
    return shared


def _in_common(store: forge_data.TokenStore) -> list[str]:
    """Say what share of the learned tokens both tokenizers can be compared at."""
    of: dict[str, Any] = store.settings["alignment"]
    share = of["tokens"] / max(1, of["learned"])
    few = share < _FEW
    lines = [
        f"{'WARNING: ' if few else ''}spans: {share:.1%} of {of['learned']:,} learned tokens lie in "
        f"{counted(of['spans'], 'spans')} that both tokenizers cut alike, {of['alike'] / of['spans']:.1%} of them one token "
        "of each" + ("; the teacher says nothing of the others: its chat template may write answers otherwise" if few else "")
    ]
    if of["left_out"]:
        lines.append(
            f"left out {of['left_out']:,} of {counted(of['samples'], 'samples')}, first {of['first_left_out']}: the teacher "
            "has no such row (it may be too long in its tokens), or other text"
        )
    return lines


distill = verb(Distill())
