"""`forge.classify`: sequence classification, one class of several or several labels a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

import forge_algos
import forge_data
import forge_dist
from forge.settings._settings import RunSettings
from forge.tasks._media import check_marks, check_media, with_media
from forge.tasks._offline import OfflineSteps
from forge.tasks._task import Run, Task
from forge.tasks.items._labelled import Labelled, given_labels
from forge.verbs._registry import verb

if TYPE_CHECKING:
    from pathlib import Path

    from forge._progress import Reporter

_MULTI, _SINGLE = "multi_label_classification", "single_label_classification"


@attrs.frozen(kw_only=True)
class ClassifySettings(RunSettings):
    """Settings of `forge.classify`."""

    data: forge_data.LabelledDataSettings
    objective: forge_algos.ClassifySettings


class Classify(Task):
    """Cross entropy of a text's class, or binary cross entropy of each of its labels."""

    name = "classify"
    settings = ClassifySettings
    about = (
        "Sequence classification: train a model with a head of one number a label to name a text's class, or all of its labels."
    )
    items_are = "texts"
    media = True

    def model_task(self, s: Any) -> forge_dist.Classifier:
        """Load the model with a head of one number for each label, once these are known."""
        own = s.objective
        return forge_dist.Classifier(labels=own.labels or (), multi_label=own.problem_type == _MULTI)

    def row_kind(self, s: Any) -> dict[str, Any]:  # noqa: ARG002 - the same for all settings
        """Say that rows are labelled texts."""
        return {"labelled": True}

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:  # noqa: ARG002 - texts are short
        """Tokenize texts whole, and keep their labels."""
        return forge_data.prepare_labelled(
            path,
            tokenizer,
            directory,
            **self.reading(s),
            max_bad_rows=s.data.max_bad_rows,
            max_seq_len=s.data.max_seq_len,
            on_overflow=s.data.on_overflow,
            chat_template=s.data.chat_template,
            chat_template_kwargs=s.data.chat_template_kwargs,
            system_prompt=s.data.system_prompt,
            media=True,
            **more,
        )

    def open_store(self, directory: Path) -> Any:
        """Open the store of labelled texts."""
        return forge_data.PromptStore.open(directory)

    def choose(self, s: Any, store: Any) -> Any:
        """Choose the names of the labels, and whether a row may have several of them."""
        own = s.objective
        if own.labels is not None and own.problem_type != "auto":
            return s
        given = given_labels(store)
        if own.problem_type == "auto":
            kind, field = (_MULTI, "labels") if given.several else (_SINGLE, "label")
            s = s.resolved("problem_type", kind, f"the rows have `{field}`")
        if own.labels is not None:
            return s
        model = forge_dist.directory_task(s.model.model_path)
        if isinstance(model, forge_dist.Classifier) and model.labels:
            return s.resolved("labels", model.labels, "those of the model, which is a classifier already")
        if len(given.names) < 2:
            raise _one_class(store, ", ".join(given.names))
        return s.resolved("labels", given.names, "those in the training rows, sorted")

    def items(self, s: Any, store: Any) -> Labelled:
        """Plan labelled texts."""
        return Labelled(store, s.objective.labels, multi_label=s.objective.problem_type == _MULTI)

    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse rows of a single class and settings that images cannot have; name unused labels."""
        check_media(s, train, held_out)
        check_marks(s, report, train, held_out)
        own = s.objective
        found = Labelled(train, own.labels, multi_label=own.problem_type == _MULTI)
        used = found.used()
        if own.problem_type != _MULTI and len(used) < 2:
            raise _one_class(train, own.labels[next(iter(used))])
        if unused := [name for number, name in enumerate(own.labels) if number not in used]:
            report.note(f"WARNING: no training row has the label {', '.join(unused)}")

    def probe_objective(self, s: Any) -> forge_algos.Objective:
        """Return the objective on labels: the language model's head is not there."""
        return _objective(s)

    def step_source(self, run: Run) -> OfflineSteps:
        """Take the steps of the batch plan."""
        return self.rehearsal_source(with_media(run))

    def rehearsal_source(self, run: Run) -> OfflineSteps:
        """Take the same steps, with images where the plan has put them in."""
        return OfflineSteps(run, _objective(run.settings))


def _objective(s: Any) -> forge_algos.Classify:
    return forge_algos.Classify(len(s.objective.labels), multi_label=s.objective.problem_type == _MULTI)


def _one_class(store: Any, name: str) -> forge_data.DataError:
    found = f"the label {name!r}" if name else "no label"
    return forge_data.DataError(
        f"{store.source(0)} and every other row ({len(store):,}) has {found}, and a classifier learns to tell two labels "
        "apart at least; add rows with another label"
    )


classify = verb(Classify())
