"""Interface between the loop and an objective: counts before any forward, sums not divided."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import nn

from forge_algos._parallel import Parallel
from forge_algos.losses import LossTerms

Weights = Callable[[nn.Module], AbstractContextManager[Any]]
"""Function (model) → context in which the model has other weights: a teacher's, a reference's."""


class Bound(Protocol):
    """An objective on one model: batches → terms."""

    @property
    def needs(self) -> int:
        """Number of values that `measure` returns; with 0 it is never called.
        Nothing more is communicated then.
        """
        ...

    def measure(self, batch: Any) -> Sequence[float | torch.Tensor]:
        """Return what the terms need to know of the whole step: numbers of this batch to add up.

        They are floats or scalar tensors. Called before the step's first term, without gradients and under autocast, for every
        micro-batch in which some data shard has something to learn, on every rank alike (on `idle()` where a rank has nothing,
        whose numbers are not counted). So it may run forwards. In an evaluation the step is all of its batches.
        """
        ...

    def __call__(self, batch: Any, totals: Sequence[float]) -> LossTerms:
        """Compute the batch's terms.
        `totals` are `measure`'s numbers added up over the step's micro-batches and data shards; [] with needs 0.
        """
        ...


class BeginsSteps(ABC):
    """Base class of a bound objective that is given all micro-batches of a step beforehand."""

    @abstractmethod
    def begin(self, batches: Sequence[Any | None], parallel: Parallel) -> None:
        """Compute what the step's terms need; an evaluation is one step.

        Args:
            batches: this rank's, None where it has nothing and other ranks have: it makes a forward all the same.
            parallel: the ranks.
        """


class LoadsBatches(ABC):
    """Base class of a bound objective whose batches are loaded before a step's first forward.

    A malformed one then costs no forward, and copies to the device are on their way early.
    """

    @abstractmethod
    def load(self, batch: Any) -> Any:
        """Check a batch and move it to the device.
        `__call__` takes what this returns as it takes a batch.
        """


class FollowsSteps(ABC):
    """Base class of an objective with numbers that steps change, the same on every rank."""

    @abstractmethod
    def after_step(self, figures: Mapping[str, float]) -> None:
        """Take the figures of a step that moved the weights into account."""

    @abstractmethod
    def state(self) -> dict[str, float]:
        """Return these numbers, by names under which a step's figures may have them; {} for none."""

    @abstractmethod
    def resume(self, state: Mapping[str, float]) -> None:
        """Go on from what `state` returned."""


class Objective(Protocol):
    """A loss on a model, driven by `train` and `evaluate`.
    It never divides, so gradients do not depend on how a batch is cut.
    """

    @property
    def unit(self) -> str:
        """Unit of `count`, in the plural: "tokens", "pairs", "completions"."""
        ...

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the further sums in every `LossTerms.stats` of this objective.
        They are always the same ones.
        """
        ...

    def count(self, batch: Any) -> float:
        """Count the terms of the batch's loss, `LossTerms.count`, without a forward.
        Where terms have weights, add these up.
        """
        ...

    def samples(self, batch: Any) -> int:
        """Count the rows of the data in the batch, for reports: documents, pairs, completions."""
        ...

    def tokens(self, batch: Any) -> int:
        """Count the tokens that go through the model, for reports."""
        ...

    def idle(self) -> Any:
        """Make a tiny batch with something to learn, for a rank without work.
        Its loss is not counted.
        """
        ...

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide the sums of `stats` over all `count` terms, each as it must be, for reports."""
        ...

    def bind(self, model: nn.Module, *, device: torch.device) -> Bound:
        """Decide once how this model is run."""
        ...
