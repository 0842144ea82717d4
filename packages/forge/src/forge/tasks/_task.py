"""What a verb adds to the page of all runs (`_run.py`): the data that it takes, what is learned from them, and by which settings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias

import attrs

import forge_accel
import forge_algos
import forge_data
import forge_dist
import forge_packing
from forge._progress import Reporter
from forge.settings._settings import RunSettings

if TYPE_CHECKING:
    # What `forge sft --help` takes to answer is half numpy's import otherwise.
    import numpy as np
    import numpy.typing as npt

Ints: TypeAlias = "npt.NDArray[np.int64]"


class Items(Protocol):
    """What a plan numbers: N samples, pairs, blocks or prompts of a store."""

    store: Any
    lengths: Ints
    """int64[N]: tokens of each, all that goes through the model."""
    longest: Ints
    """int64[N]: tokens of the longest row in each."""
    loss_counts: Ints
    """int64[N]: tokens that are learned or scored in each."""
    sources: Ints | None
    """int64[N]: which of several weighted sources each is from."""
    weights: list[float] | None

    def __len__(self) -> int: ...

    def __str__(self) -> str:
        """Say what there is, as `1,500 pairs, in which 30,000 tokens are scored`."""
        ...

    def source(self, index: int) -> str:
        """Where it came from, as `train.jsonl:417`."""
        ...

    def size(self, index: int) -> str:
        """Say what has how many tokens, as `train.jsonl:417 has 2,300 tokens`."""
        ...

    @property
    def shorter(self) -> str:
        """The setting that makes them shorter, and how."""
        ...

    def batch(self, indices: Sequence[int] | Ints) -> Any:
        """One micro-batch."""
        ...

    def few(self) -> list[tuple[Any, Any]]:
        """Some short samples (input_ids, labels), enough to compare two models by."""
        ...


@attrs.frozen(kw_only=True)
class Measured:
    """What held-out data say of a model."""

    loss: float | None
    """None where a verb has no held-out loss (online methods)."""
    count: int
    unit: str
    figures: Mapping[str, float]

    def metrics(self) -> dict[str, float | int]:
        """As metrics.jsonl has them: `eval_loss`, `eval_NAME`, `eval_loss_tokens`."""
        figures = {f"eval_{name}": value for name, value in self.figures.items()}
        if self.loss is None:
            return {f"eval_{self.unit}": self.count, **figures}
        return {"eval_loss": self.loss, f"eval_loss_{self.unit}": self.count, **figures}

    def value(self, name: str) -> float | None:
        """A figure by name; `loss` is one."""
        return self.loss if name == "loss" else self.figures.get(name)

    def __str__(self) -> str:
        parts = [] if self.loss is None else [f"loss {self.loss:.4f}"]
        parts += [f"{name} {value:.4f}" for name, value in self.figures.items()]
        return f"{', '.join(parts)} over {self.count:,} {self.unit}"


@attrs.frozen(kw_only=True)
class Run:
    """A run as its page has it once the model is there: what a verb's own work is made from."""

    settings: Any
    """With everything chosen."""
    model: Any
    """As it is trained: with its adapter, wrapped for its ranks, its first weights in it."""
    tokenizer: Any
    train: Items
    held_out: Items | None
    plan: forge_packing.BatchPlan
    num_steps: int
    """Optimizer steps."""
    strategy: forge_dist.Strategy
    ranks: forge_dist.Ranks
    machine: forge_accel.Accelerator
    device: Any
    autocast: Callable[[], AbstractContextManager[Any]]
    root: Path
    """Of the run's files."""
    load_frozen: Callable[[str], Any]
    """Model path → a second model on the same ranks that nothing trains."""
    report: Reporter
    metrics: Callable[[Mapping[str, object]], None]
    """Appends a line to metrics.jsonl."""
    identity: Mapping[str, str]


class Work(Protocol):
    """What a run does in each step, and what it measures."""

    objective: forge_algos.Objective

    def first(self) -> None:
        """Before the first step of a run that did not go on: what has to hold then."""
        ...

    def steps(self, first: int) -> Iterator[list[Any]]:
        """This rank's micro-batches of each step from the one after `first` on, to the last."""
        ...

    def measure(self, model: Any) -> Measured | None:
        """The held-out figures of a model; None where nothing was held out."""
        ...


class Task(ABC):
    """One verb. Each has a file with the class of its settings, a subclass of this, and the function that users call."""

    name: ClassVar[str]
    settings: ClassVar[type[RunSettings]]
    about: ClassVar[str]
    """What `--help` says."""
    loads: ClassVar[Literal["causal", "reward"]] = "causal"
    additions: ClassVar[tuple[str, ...]] = ()
    """Modules that are put on the model for the run, and are no part of its export."""

    def prepare(self, s: Any, path: Any, tokenizer: Any, directory: Path, report: Reporter, **more: Any) -> Any:
        """Tokenise the rows of a path into a store in `directory`; `more` is passed on."""
        return forge_data.prepare(
            path,
            tokenizer,
            directory,
            format=s.data.data_format,
            train_on=s.data.train_on,
            max_seq_len=s.data.max_seq_len,
            on_overflow=s.data.on_overflow,
            preprocess=s.data.preprocess,
            num_proc=s.data.num_proc,
            progress=report.count("tokenising"),
            **more,
        )

    def open(self, directory: Path) -> Any:
        """Open the store that `prepare` made."""
        return forge_data.TokenStore.open(directory)

    @abstractmethod
    def items(self, s: Any, store: Any) -> Items:
        """Say what is planned of a store."""

    @abstractmethod
    def check(self, s: Any, report: Reporter, train: Any, held_out: Any) -> None:
        """Refuse stores that would teach something false."""

    def length(self, s: Any, items: Items) -> tuple[int | None, int | None]:  # noqa: ARG002 - the data may decide
        """(epochs, steps) of the run."""
        return s.plan.num_epochs, s.plan.max_steps

    def updates(self, s: Any) -> int:  # noqa: ARG002 - the settings may decide
        """How many optimizer steps are made with what one step of the plan names."""
        return 1

    def num_steps(self, s: Any, plan: forge_packing.BatchPlan) -> int:
        """Optimizer steps of the run."""
        made = plan.num_steps * self.updates(s)
        return made if s.plan.max_steps is None else min(made, s.plan.max_steps)

    def summary(self, plan: forge_packing.BatchPlan) -> str:
        """Say what was planned."""
        return plan.summary()

    def look(self, s: Any) -> None:
        """Look at what the settings name beside model and rows, before any work is done."""
        for name, path in self.paths(s).items():
            try:
                forge_dist.check_model_path(path)
            except forge_dist.ModelError as error:
                raise forge_dist.ModelError(str(error).replace("model_path", name)) from None

    def paths(self, s: Any) -> dict[str, str]:  # noqa: ARG002 - most have none
        """Further models by the setting that names them: a run belongs to them too."""
        return {}

    def probe(self, s: Any) -> forge_algos.Objective:  # noqa: ARG002 - the settings may decide
        """What asks a model, once it is loaded, whether it can be trained so."""
        return forge_algos.SFT()

    def extend(self, model: Any, s: Any) -> None:  # noqa: B027 - most put nothing on it
        """Put on the model what this verb trains beside it."""

    def refer(self, run: Run) -> None:  # noqa: B027 - most have no reference
        """Find what has to be found with the model's first weights, and keep it in the run's files."""

    @abstractmethod
    def begin(self, run: Run) -> Work:
        """Make the run's work; the model may have gone on from a full state by now."""
