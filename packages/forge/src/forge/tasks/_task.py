"""Interface of a training verb: what it adds to `run/_run.py`, which all verbs share."""

from __future__ import annotations

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import attrs

import forge_accel
import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._counted import counted, figure
from forge.settings._settings import RunSettings, row_tokens
from forge.tasks._system_message import write_system_prompt
from forge.tasks.items._items import Items, padding

if TYPE_CHECKING:
    from forge._progress import Reporter


@attrs.frozen(kw_only=True)
class Evaluation:
    """Figures of a model on held-out data."""

    loss: float | None
    """None where a verb has no held-out loss (online methods)."""
    count: float
    """How many tokens, pairs, answers or completions were measured; the sum of their weights, if tokens have some."""
    unit: str
    """What `count` counts."""
    figures: Mapping[str, float]

    def metrics(self) -> dict[str, float]:
        """Return the keys of metrics.jsonl: `eval_loss`, `eval_NAME`, `eval_loss_tokens`."""
        figures = {f"eval_{name}": value for name, value in self.figures.items()}
        if self.loss is None:
            return {f"eval_{self.unit}": self.count, **figures}
        return {"eval_loss": self.loss, f"eval_loss_{self.unit}": self.count, **figures}

    def value(self, name: str) -> float | None:
        """Return a figure by name, `loss` included; None where it was not measured."""
        return self.loss if name == "loss" else self.figures.get(name)

    def __str__(self) -> str:
        parts = [] if self.loss is None else [f"loss {figure(self.loss)}"]
        parts += [f"{name} {self._shown(name, value)}" for name, value in self.figures.items()]
        return f"{', '.join(parts)} over {counted(round(self.count, 1), self.unit)}"

    def _shown(self, name: str, value: float) -> str:
        # Online verbs count what was cut off, others have its share; a step's line shows the share.
        if name == "cut_off":
            return f"{value / self.count if isinstance(value, int) else value:.0%}"
        return f"{value:,}" if isinstance(value, int) else figure(value)


@attrs.frozen(kw_only=True)
class Run:
    """Everything of a run that its step source needs, once the model is loaded."""

    settings: Any
    """With every choice made."""
    model: Any
    """The model that is trained: with its adapter, wrapped for its ranks, before its first step."""
    tokenizer: Any
    train: Items
    held_out: Items | None
    plan: forge_packing.BatchPlan
    num_steps: int | None
    """Optimizer steps; None for a run without end."""
    strategy: forge_dist.Strategy
    ranks: forge_dist.Ranks
    machine: forge_accel.Accelerator
    device: Any
    autocast: Callable[[], AbstractContextManager[Any]]
    root: Path
    """Directory of the run's files: the hidden one until the run is published."""
    load_frozen: Callable[..., Any]
    """Model path → a second, frozen model on the same ranks; None → the model as the run began, with its `adapter_path`.
    With `as_trained=True` its weights are in the dtype of the trained ones, which they are read for."""
    report: Reporter
    metrics: Callable[[Mapping[str, object]], None]
    """Appends a line to metrics.jsonl."""
    identity: Mapping[str, str]
    """Digests of the models and the id of this run, as in run.json."""
    optimizer: Any = None
    """Of the trained model's weights."""
    done: int = 0
    """Steps that were made before, where the run is resumed."""
    adapter: str = ""
    """Digest of the adapter that the run goes on from; empty where it begins one."""
    write_model: Callable[[Path], Any] = attrs.field(default=None, kw_only=True)
    """Writes the model as it is now, as an export has it, to a directory that is not there yet; collective."""
    writes: str = "model"
    """What that directory holds: the "model", or an "adapter"."""
    rounded: Callable[[], AbstractContextManager[None]] = attrs.field(default=nullcontext, kw_only=True)
    """Puts the weights in place that the model computes with: rounded ones with `qat`."""
    others: weakref.WeakSet[Any] = attrs.field(factory=weakref.WeakSet)
    """Models beside the trained one that are loaded now: a reference, a teacher, a reward model."""

    def steps_from(self, first: int) -> Iterator[int]:
        """Iterate over the indices of the steps from `first` to the last, or without end."""
        return itertools.count(first) if self.num_steps is None else iter(range(first, self.num_steps))


class StepSource(Protocol):
    """The micro-batches of every step of a run, and its evaluation."""

    objective: forge_algos.Objective
    average: forge_algos.WeightAverage | None
    """Moving average of the trained weights, where the objective reads one."""

    def check_start(self) -> None:
        """Check what must hold before the first step of a run that was not resumed."""
        ...

    def steps(self, first: int) -> Iterator[list[Any]]:
        """Yield this rank's micro-batches of each step, from the one with index `first` to the last."""
        ...

    def evaluate(self, model: Any) -> Evaluation | None:
        """Measure a model on the held-out data; None where there are none."""
        ...

    def held_out_rows(self) -> Iterator[Any]:
        """Yield this rank's packed rows of what `evaluate` measured last."""
        ...


class Task(ABC):
    """Base class of the training verbs.

    A verb's file in `verbs/` holds its settings class, a subclass of this, and the function that users call.
    """

    name: ClassVar[str]
    settings: ClassVar[type[RunSettings]]
    about: ClassVar[str]
    """One sentence for `--help`, the function's docstring and docs/settings.md."""
    items_are: ClassVar[str] = "samples"
    """What the batch plan numbers, in the log; metrics.jsonl and exports say samples for every verb."""
    samples_are: ClassVar[str | None] = None
    """What `samples` of a result counts; None: the same as `items_are`."""
    extra_modules: ClassVar[tuple[str, ...]] = ()
    """Modules that are trained on the model and left out of its export."""
    media: ClassVar[bool] = False
    """Whether rows may have images."""

    def check_settings(self, s: Any) -> None:
        """Check the models and functions that the settings name, before any work is done."""
        for name, path in self.other_models(s).items():
            try:
                forge_dist.check_model_path(path)
            except forge_dist.ModelError as error:
                raise forge_dist.ModelError(str(error).replace("model_path", name, 1)) from None

    def row_kind(self, s: Any) -> dict[str, Any]:
        """Return the argument by which `forge_data.check_first_row` knows what rows are read."""
        return {"format": s.data.data_format}

    def preprocess(self, s: Any) -> str | None:
        """Return the function that rows go through first, as `preprocess` names one."""
        return s.data.preprocess

    def reading(self, s: Any) -> dict[str, Any]:
        """Return the arguments with which rows are read, whatever they hold."""
        return {
            "preprocess": self.preprocess(s),
            "rename_columns": s.data.rename_columns,
            "on_bad_row": s.data.on_bad_row,
            "max_samples": s.data.max_samples,
        }

    def check_rows(self, s: Any, setting: str) -> None:
        """Refuse files for their first row, as `prepare` would, or for columns that no row has."""
        forge_data.check_first_row(getattr(s.data, setting), media=self.media, **self.row_kind(s), **self.reading(s))

    def other_models(self, s: Any) -> dict[str, str]:  # noqa: ARG002 - most have none
        """Return the paths of further models by setting; a resume needs the same ones."""
        return {}

    def row_readers(self, s: Any) -> dict[str, str]:
        """Return those of the further models that are given the rows' own tokens."""
        return self.other_models(s)

    def text_readers(self, s: Any) -> dict[str, str]:  # noqa: ARG002 - most have none
        """Return those of the further models that read texts with a tokenizer of their own."""
        return {}

    def model_task(self, s: Any) -> Any:  # noqa: ARG002 - the settings may decide
        """Return the head that is loaded; "embedding" is none, a `forge_dist.Classifier` has one."""
        return "causal"

    def choose(self, s: Any, store: Any) -> Any:  # noqa: ARG002 - most choose nothing
        """Return settings with what the training rows decide, the same on every rank.

        `store` has all of them, those too that `validation_split` holds out.
        """
        return s

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:
        """Tokenize rows into a store in `directory`; `more` is passed to `forge_data.prepare`."""
        more.setdefault("media", self.media)
        return forge_data.prepare(
            path,
            tokenizer,
            directory,
            format=s.data.data_format,
            train_on=s.data.train_on,
            turns=s.data.turns,
            chat_template=s.data.chat_template,
            chat_template_kwargs=s.data.chat_template_kwargs,
            system_prompt=s.data.system_prompt,
            turn_end=s.data.turn_end,
            train_on_turn_end=s.data.train_on_turn_end,
            max_seq_len=s.data.max_seq_len,
            on_overflow=s.data.on_overflow,
            **self.reading(s),
            max_bad_rows=s.data.max_bad_rows,
            num_proc=s.data.num_proc,
            progress=report.progress("tokenizing"),
            **more,
        )

    def open_store(self, directory: Path) -> Any:
        """Open the store that `prepare` made."""
        return forge_data.TokenStore.open(directory)

    @abstractmethod
    def items(self, s: Any, store: Any) -> Items:
        """Return the items of a store that the batch plan numbers."""

    @abstractmethod
    def check_data(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Raise where the rows of the stores would teach something wrong."""

    def shared(self, s: Any, items: Any) -> dict[str, Any]:  # noqa: ARG002 - most share nothing
        """Return what the settings let items share, as arguments of `forge_packing.plan`."""
        return {}

    def batch_plan(self, s: Any, items: Items, world_size: int) -> forge_packing.BatchPlan:
        """Plan all steps of a run on its items."""
        endless = forge_packing.plan(
            items.lengths,
            batch_size=s.plan.effective_batch_size,
            max_tokens=row_tokens(s),
            world_size=world_size,
            seed=s.plan.seed,
            shuffle=s.plan.shuffle,
            epochs=None,
            loss_counts=items.loss_counts,
            sources=items.sources,
            weights=items.weights,
            **padding(s, items),
            **self.shared(s, items),
        )
        return endless.until(epochs=s.plan.epochs, max_steps=self.steps(s, endless))

    def steps(self, s: Any, endless: forge_packing.BatchPlan) -> int | None:
        """Return the most steps of the batch plan, given one without end; None for no limit."""
        return s.plan.last_step(endless.steps_to)

    def updates(self, s: Any) -> int:  # noqa: ARG002 - the settings may decide
        """Return how many optimizer steps are made with one step of the batch plan."""
        return 1

    def num_steps(self, s: Any, plan: forge_packing.BatchPlan) -> int | None:
        """Return the optimizer steps of the run; None for one without end."""
        if plan.endless:
            return None
        planned = plan.num_steps * self.updates(s)
        return planned if s.plan.max_steps is None else min(planned, s.plan.max_steps)

    def plan_summary(self, plan: forge_packing.BatchPlan, *, divided: bool = True) -> str:
        """Describe the batch plan for the log; `divided` says how ranks and micro-batches divide it."""
        return plan.summary(self.items_are, divided=divided)

    def probe_objective(self, s: Any) -> forge_algos.Objective:  # noqa: ARG002 - the settings may decide
        """Return the objective used to check that the loaded model supports this training."""
        return forge_algos.SFT()

    def add_modules(self, model: Any, s: Any) -> None:  # noqa: B027 - most add none
        """Put modules on the model that are trained beside it, such as a value head."""

    def export_files(self, s: Any, model: Any) -> Callable[[Path], None] | None:  # noqa: ARG002 - most have none
        """Return what writes further files into the folder of an export; None for none."""
        text = getattr(s.data, "system_prompt", None)
        return None if text is None else partial(write_system_prompt, text=text)

    def score_reference(self, run: Run) -> None:  # noqa: B027 - most have no reference
        """Compute what depends on the initial weights, and keep it in the run's files."""

    def rehearsal_source(self, run: Run) -> Any:
        """Return what gives the steps of a run without numbers."""
        return self.step_source(run)

    @abstractmethod
    def step_source(self, run: Run) -> StepSource:
        """Return the run's steps; by now the model may hold the weights of a full state."""
