"""What the loop needs of an objective: a count before any forward, and terms that are summed and not divided."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from forge_algos.losses import LossTerms


class Bound(Protocol):
    """An objective on one model: what turns batches into terms."""

    @property
    def needs(self) -> int:
        """How many numbers `measure` gives; with 0 it is never called and nothing more is communicated."""
        ...

    def measure(self, batch: Any) -> Sequence[float | torch.Tensor]:
        """What the terms need to know of the whole step: numbers (or scalar tensors) of this batch, which the loop adds up.

        Called before the step's first term, without gradients and under autocast, for every micro-batch in which some rank
        has something to learn, on every rank alike (`idle()` on one that has not, whose numbers are not counted). So it may
        run forwards. In an evaluation the step is all of its batches.
        """
        ...

    def __call__(self, batch: Any, totals: Sequence[float]) -> LossTerms:
        """The batch's terms, given `measure`'s numbers added up over the step's micro-batches and ranks; [] with needs 0."""
        ...


class Objective(Protocol):
    """A loss on a model. `train` and `evaluate` drive it; it never divides, so gradients do not depend on the batch's cut."""

    @property
    def unit(self) -> str:
        """What `count` counts, in the plural: "tokens", "pairs", "completions"."""
        ...

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the further sums in every `LossTerms.stats` of this objective; always the same ones."""
        ...

    def count(self, batch: Any) -> int:
        """How many terms the batch's loss has: what `LossTerms.count` will be, known without a forward."""
        ...

    def samples(self, batch: Any) -> int:
        """Rows of the data in the batch, for the books: documents, pairs, completions."""
        ...

    def tokens(self, batch: Any) -> int:
        """Tokens that go through the model, for the books."""
        ...

    def idle(self) -> Any:
        """A tiny made-up batch with something to learn, for a rank that has nothing while others have; its loss is not counted."""
        ...

    def figures(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """What a person reads beside the loss: the sums of `stats` over all `count` terms, divided as each must be."""
        ...

    def bind(self, model: nn.Module, *, device: torch.device) -> Bound:
        """Decide once how this model is run."""
        ...
