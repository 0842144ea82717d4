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
from forge.tasks._media import has_media, media_inputs, with_media
from forge.tasks._offline import OfflineSteps
from forge.tasks._on_policy import OnPolicySteps, RehearsedOnPolicy
from forge.tasks._reference_model import require_same_tokens
from forge.tasks._task import Run
from forge.tasks.items._media import media_names
from forge.tasks.items._own_answers import own_answers
from forge.tasks.items._own_taught import OwnTaught
from forge.tasks.items._stored_teacher import StoredTeacher, read_record, vocabulary_digest, with_teacher
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

    def check(self) -> None:
        """Refuse what samples from another model than the one that learns, or has no length."""
        super().check()
        if not self.objective.on_policy:
            return
        if self.plan.max_tokens is not None:
            raise SettingsError(
                f"max_tokens={self.plan.max_tokens} with on_policy: how many tokens are learned is known only once completions "
                "are sampled. Give max_steps or num_epochs."
            )
        if self.data.train_on_turn_end == "all":
            raise SettingsError(
                "train_on_turn_end=all with on_policy: the end of a last message by the user would be taken for an answer, and "
                "the model asked for it. Take turn, last or none."
            )
        if self.data.on_overflow == "split":
            raise SettingsError(
                "on_overflow=split with on_policy: what a long row is cut into begins within an answer or a message, which is "
                "no prompt. Take drop, truncate or error."
            )
        if self.optimizer.optimizer == "schedule_free":
            raise SettingsError(
                "optimizer=schedule_free with on_policy trains another model than the one that samples the completions: take "
                "another."
            )


class Distill(SFT):
    """Divergence from a teacher at every learned token, or at spans of another tokenizer."""

    name = "distill"
    settings = DistillSettings
    about = "Distillation: train a model to predict as a larger one does, at the learned tokens of the rows."

    def other_models(self, s: Any) -> dict[str, str]:
        """Return the path of the teacher, or of what is stored of it."""
        stored = s.objective.teacher_logprobs
        return {"teacher_path": s.objective.teacher_path} if stored is None else {"teacher_logprobs": stored}

    def row_readers(self, s: Any) -> dict[str, str]:
        """Return the teacher where it reads the rows in the run."""
        return {} if s.objective.teacher_logprobs is not None else self.other_models(s)

    def check_settings(self, s: Any) -> None:
        """Check the teacher, which must have the same vocabulary where one is assumed."""
        own = s.objective
        if own.teacher_logprobs is not None:
            _check_stored(s)
            return
        super().check_settings(s)
        if own.loss == "jsd":
            require_same_tokens(
                s,
                "teacher_path",
                own.teacher_path,
                otherwise="Or set loss=gold, which compares two models of any two tokenizers.",
            )
        elif "split" in (s.data.on_overflow, *s.data.own_values("on_overflow")):
            raise SettingsError(
                f"on_overflow=split with loss={own.loss}: two tokenizers would cut a row at two places. Take drop, truncate or "
                "error."
            )

    def check_rows(self, s: Any, setting: str) -> None:
        """Refuse files for their first row, one with images too where two tokenizers read it."""
        own = s.objective
        media = self.media and own.loss == "jsd" and own.teacher_logprobs is None
        forge_data.check_first_row(getattr(s.data, setting), media=media, **self.row_kind(s), **self.reading(s))

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:
        """Tokenize rows, with both tokenizers where they may differ; log what both have in common."""
        own = s.objective
        if own.teacher_logprobs is not None:
            more["media"] = False
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

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse what the lint stops, and images that settings or the model cannot have."""
        super().check_data(s, report, train, held_out)
        if s.objective.on_policy and has_media(train, held_out) and media_inputs(s).marks:
            raise SettingsError(
                f"on_policy and rows with {media_names(train, held_out)}: this model's prompt sees what is ahead of it, and "
                "its completions do not (PaliGemma), which is not sampled here while training. Leave on_policy out."
            )

    def items(self, s: Any, store: Any) -> Any:
        """Plan samples with their teacher's tokens, where it has others or they are stored."""
        own = s.objective
        if own.teacher_logprobs is not None:
            check_kind(self.name, store, "supervised", "rows to imitate: messages, prompt and completion, documents, or tokens")
            left_out = own.teacher_rest == "left_out"
            return with_teacher(store, StoredTeacher(own.teacher_logprobs, left_out=left_out, temperature=own.temperature))
        if own.on_policy and own.loss == "jsd":
            check_kind(self.name, store, "supervised", "rows to imitate: messages, prompt and completion, or tokens")
            return own_answers(store, own.max_new_tokens)
        if own.loss == "jsd":
            return super().items(s, store)
        check_kind(self.name, store, "supervised", "rows to imitate: messages, prompt and completion")
        if not store.span_counts.any():
            raise forge_data.DataError(
                f"{store.source(0)} and the other {len(store) - 1:,} samples that train, or that are held out: of none do both "
                "tokenizers have the same learned text. Set another `validation_split` or `seed`, or give rows that both read "
                "alike"
            )
        return OwnTaught(store, own.teacher_path, own.max_new_tokens) if own.on_policy else TaughtRows(store)

    def shared(self, s: Any, items: Any) -> dict[str, Any]:
        """Return what samples begin with; nothing where the teacher's begin otherwise."""
        own = s.objective
        whole = own.loss == "jsd" and own.teacher_logprobs is None and not own.on_policy
        return super().shared(s, items) if whole else {}

    def step_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan, or sample for some of them."""
        own = run.settings.objective
        if not own.on_policy:
            return super().step_source(run)
        run = with_media(run)
        run.report.note(
            f"on_policy: {own.on_policy:.0%} of the steps are on completions of at most {own.max_new_tokens:,} tokens that the "
            "model samples for the rows' last prompts; loss tokens above are those of the rows' own answers"
        )
        return OnPolicySteps(run, _objective(run))

    def rehearsal_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan, with the teacher on the same ranks."""
        own = run.settings.objective
        if own.teacher_logprobs is not None:
            return OfflineSteps(run, forge_algos.TopDistill(settings=own))
        objective = _objective(run)
        if own.on_policy:
            return RehearsedOnPolicy(run, objective)
        shares = isinstance(objective, forge_algos.Distill)
        return OfflineSteps(with_shared_prefixes(run, run.model, objective.teacher) if shares else run, objective)


def _objective(run: Run) -> forge_algos.Distill | forge_algos.AlignedDistill:
    """Return what a live teacher is asked."""
    own = run.settings.objective
    teacher = run.load_frozen(own.teacher_path)
    if own.loss == "jsd":
        return forge_algos.Distill(settings=own, teacher=teacher)
    return forge_algos.AlignedDistill(settings=own, teacher=teacher, shared=_shared(run))


def _check_stored(s: Any) -> None:
    """Raise SettingsError unless what is stored is of this model's tokens and temperature."""
    own = s.objective
    about = read_record(own.teacher_logprobs)
    tokenizer = forge_data.load_tokenizer(s.model.model_path)
    forge_data.add_tokens(tokenizer, s.model.add_tokens, special=s.model.add_special_tokens)
    if vocabulary_digest(tokenizer) != about["tokenizer"]:
        raise SettingsError(
            f"teacher_logprobs {own.teacher_logprobs}: was computed for another tokenizer than that of model_path (with its "
            "add_tokens), so that it is about other words. Give `forge teach` the same model_path."
        )
    if own.teacher_rest == "class" and own.temperature != about["temperature"]:
        raise SettingsError(
            f"temperature={own.temperature:g}: teacher_logprobs {own.teacher_logprobs} was computed with "
            f"{about['temperature']:g}, and at another one the probability of the rest is not known. Give that one, "
            f"`forge teach --temperature {own.temperature:g}`, or teacher_rest=left_out."
        )


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
