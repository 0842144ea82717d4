"""`forge.embed`: text embeddings, by pairs of a query and its document or by labelled texts."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
import forge_dist
from forge._counted import first_of
from forge._errors import SettingsError
from forge.saving._sentence_transformers import write_sentence_transformers
from forge.settings._settings import RunSettings
from forge.tasks._media import (
    check_marks,
    check_media,
    has_media,
    media_inputs,
    media_join,
    one_text_at_a_time,
    with_media,
)
from forge.tasks._offline import OfflineSteps
from forge.tasks._task import Run, Task
from forge.tasks.items._text_pairs import TextPairs, TextsOfLabels
from forge.verbs._registry import verb

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from forge._progress import Reporter

_TEMPERATURE, _MARGIN = 0.05, 5.0
_COUNTED_STEPS = 32


@attrs.frozen(kw_only=True)
class EmbedSettings(RunSettings):
    """Settings of `forge.embed`."""

    data: forge_data.EmbedDataSettings
    objective: forge_algos.EmbedSettings


class Embed(Task):
    """InfoNCE of queries among all documents of the step, or all triplets of its labelled texts."""

    name = "embed"
    settings = EmbedSettings
    about = "Embedding models: train a model so that a query lies near its document and far from others, or texts by label."
    items_are = "queries"
    media = True

    def model_task(self, s: Any) -> str:  # noqa: ARG002 - always the same
        """Load the model without a head."""
        return "embedding"

    def check_settings(self, s: Any) -> None:
        """Refuse what an embedding cannot be trained with, and prefixes that no text would get."""
        super().check_settings(s)
        if s.strategy.cp_size > 1:
            raise SettingsError(
                f"cp_size={s.strategy.cp_size} divides a text over ranks, and an embedding needs the whole of it. Leave it "
                "out; a lower max_tokens_per_gpu makes smaller micro-batches of the same step."
            )
        if s.adapter.adapter in ("prefix", "prompt", "adapter_prompt"):
            raise SettingsError(
                f"adapter={s.adapter.adapter} puts virtual tokens before a text, which sentence-transformers would not. Take "
                "adapter=lora."
            )
        if not _of_labels(s):
            _prefixes(s)  # a file of prompts that cannot be read
            return
        for name in ("query_prefix", "document_prefix"):
            if getattr(s.data, name):
                raise SettingsError(
                    f"{name} has no effect with loss=batch_all_triplet, whose texts are neither queries nor documents. Leave "
                    "it out."
                )

    def row_kind(self, s: Any) -> dict[str, Any]:
        """Say whether rows are labelled texts or pairs."""
        return {"labelled": True} if _of_labels(s) else {"pairs": True}

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:  # noqa: ARG002 - texts are short
        """Tokenize the texts of each row."""
        of_pairs: dict[str, Any] = {} if _of_labels(s) else _prefixes(s)
        return (forge_data.prepare_labelled if _of_labels(s) else forge_data.prepare_text_pairs)(
            path,
            tokenizer,
            directory,
            **self.reading(s),
            max_bad_rows=s.data.max_bad_rows,
            max_seq_len=s.data.max_seq_len,
            on_overflow=s.data.on_overflow,
            **of_pairs,
            media=True,
            as_messages=(messages := _as_messages(s, tokenizer)),
            generation_prompt=messages and forge_dist.asks_before_pooling(s.model.model_path),
            **more,
        )

    def open_store(self, directory: Path) -> Any:
        """Open the store of texts."""
        return forge_data.PromptStore.open(directory)

    def choose(self, s: Any, store: Any) -> Any:  # noqa: ARG002 - the model decides
        """Choose the pooling of the model, and the loss's own number."""
        if s.objective.pooling == "auto":
            s = s.resolved("pooling", *forge_dist.model_pooling(s.model.model_path))
        for setting, prefix in ({} if _of_labels(s) else _prefixes(s)).items():
            if getattr(s.data, setting) is None:
                s = s.resolved(setting, prefix, "the prompt that is stored with the model" if prefix else "it has none stored")
        name, value = ("margin", _MARGIN) if _of_labels(s) else ("temperature", _TEMPERATURE)
        if getattr(s.objective, name) is None:
            s = s.resolved(name, value, f"the default with loss={s.objective.loss}")
        return s

    def items(self, s: Any, store: Any) -> Any:
        """Plan queries with their documents, or labelled texts."""
        return TextsOfLabels(store) if _of_labels(s) else TextPairs(store)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse rows of which nothing is learned: without negatives, or without triplets.

        So are settings that rows with images cannot have. A held-out row without negatives is warned of.
        """
        check_media(s, train, held_out)
        if not _of_labels(s) and has_media(train, held_out) and not media_join(s):
            raise SettingsError(one_text_at_a_time(train, "the processor of this model makes arrays that are not joined"))
        check_marks(s, report, train, held_out)
        found = self.items(s, train)
        if isinstance(found, TextsOfLabels):
            counts = [int((found.targets == label).sum()) for label in found.used()]
            if len(counts) < 2 or max(counts) < 2:
                raise forge_data.DataError(
                    f"{train.source(0)} and the other rows ({len(train):,}) make no triplet: two texts of one label and one of "
                    "another are needed; add rows"
                )
            return
        if len(found) == 1 and not found.hard_negatives:
            raise forge_data.DataError(
                f"{train.source(0)} is the only row to train on, and has no hard negative: there is nothing that its document "
                "could be told from, so nothing would be learned; add rows"
            )
        if held_out is not None and len(held_out) == 1 and not self.items(s, held_out).hard_negatives:
            report.note(
                f"WARNING: {held_out.source(0)} is the only held-out row, and has no hard negative: with nothing to be told "
                "from, its loss is 0 and its accuracy and mrr are 1 whatever the model does. Hold out more."
            )
        if s.plan.effective_batch_size == 1 and not found.hard_negatives:
            raise SettingsError(
                "effective_batch_size=1 leaves a query alone with its document, and there are no hard negatives: nothing would "
                "be learned. Raise it; every other document of a step is a negative."
            )

    def probe_objective(self, s: Any) -> forge_algos.Objective:
        """Return the objective on embeddings: the language model's head is not there."""
        return _objective(s)

    def export_files(self, s: Any, model: Any) -> Callable[[Path], None]:
        """Write what sentence-transformers reads beside each export."""
        kinds = _kinds(s)
        return partial(
            write_sentence_transformers,
            width=forge_dist.hidden_size(model),
            pooling=s.objective.pooling,
            max_seq_len=s.data.max_seq_len,
            query_prefix=s.data.query_prefix or "",
            document_prefix=s.data.document_prefix or "",
            messages=kinds,
            generation_prompt=kinds is not None and forge_dist.asks_before_pooling(s.model.model_path),
        )

    def step_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan."""
        run = with_media(run)
        _report_forwards(run)
        return self.rehearsal_source(run)

    def rehearsal_source(self, run: Run) -> OfflineSteps:
        """Take the same steps, with images where the plan has put them in."""
        return OfflineSteps(run, _objective(run.settings))


def _of_labels(s: Any) -> bool:
    return s.objective.loss == "batch_all_triplet"


def _as_messages(s: Any, tokenizer: Any) -> bool:
    """Return whether every text is the user's message.

    So sentence-transformers has it of a model of several modalities.
    """
    return bool(tokenizer.chat_template) and forge_dist.has_modalities(s.model.model_path)


def _kinds(s: Any) -> tuple[str, ...] | None:
    """Return the kinds of media that a text may have; None where it is no message."""
    if not _as_messages(s, forge_data.load_tokenizer(s.model.model_path)):
        return None
    try:
        return media_inputs(s).kinds
    except forge_data.TokenizerError:
        return ()  # it has no processor that can be loaded, and no row has media


def _prefixes(s: Any) -> dict[str, str]:
    """Return what stands before each query and document: what is set, or the model's own."""
    given = {name: getattr(s.data, name) for name in ("query_prefix", "document_prefix")}
    if None not in given.values():
        return given
    stored = forge_dist.model_prompts(s.model.model_path)
    own = {"query_prefix": stored.get("query", ""), "document_prefix": stored.get("document", stored.get("passage", ""))}
    return {name: own[name] if prefix is None else prefix for name, prefix in given.items()}


def _objective(s: Any) -> forge_algos.Objective:
    own = s.objective
    pooling = "last" if own.pooling == "auto" else own.pooling
    if _of_labels(s):
        return forge_algos.BatchAllTriplet(pooling=pooling, margin=_MARGIN if own.margin is None else own.margin)
    temperature = _TEMPERATURE if own.temperature is None else own.temperature
    return forge_algos.Contrastive(pooling=pooling, temperature=temperature, exclude_same_text=own.exclude_same_text)


def _report_forwards(run: Run) -> None:
    """Say how many steps have several micro-batches, each of which is run twice."""
    plan = run.plan
    steps = range(_COUNTED_STEPS if plan.endless else min(plan.num_steps, _COUNTED_STEPS))
    several = sum(len(plan.micro_batches(step)) > 1 for step in steps)
    cost = (
        f"; {several} of {first_of(len(steps), 'steps')} {'has' if several == 1 else 'have'} several micro-batches a rank, "
        "each of which takes one more forward without gradients (a higher max_tokens_per_gpu makes fewer)"
        if several
        else ""
    )
    number, what = run.settings.plan.effective_batch_size, "texts" if _of_labels(run.settings) else "queries"
    run.report.note(f"embeddings: of all {number:,} {what} of a step together, over all micro-batches and ranks{cost}")


embed = verb(Embed())
