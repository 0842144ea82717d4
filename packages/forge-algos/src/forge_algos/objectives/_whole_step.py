"""Losses over all texts of a step: embeddings first, then each micro-batch's own gradient.

A text's term depends on the embeddings of all others, so no micro-batch has it alone. As in GradCache (Gao et al., arXiv
2101.06983) all texts of the step are embedded without gradients and gathered over the data shards; the gradient of the whole
step's loss with respect to each embedding is computed from these; and then each micro-batch is run again, with gradients, and
its own embeddings are given theirs. Where the ranks have one micro-batch each, it is run once.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import LossError
from forge_algos._parallel import ALONE, Parallel
from forge_algos.batches._learned import RowLoader
from forge_algos.heads._embedding import Pool, choose_embedder
from forge_algos.heads._packable import require_packable
from forge_algos.losses import LossTerms
from forge_algos.objectives._objective import BeginsSteps

_SCORES = 1 << 24
"""Most pairs of texts that are compared at a time."""


@attrs.frozen(kw_only=True, eq=False)
class StepTexts:
    """All texts of a step, of every micro-batch and data shard."""

    embeddings: torch.Tensor
    """float32[N, D]."""
    facts: NDArray[np.int64]
    """int64[N, F], what the objective says of each text."""

    def __len__(self) -> int:
        return len(self.facts)

    def cut(self, rows: Sequence[int] | NDArray[np.int64]) -> list[NDArray[np.int64]]:
        """Divide some of the texts into parts that can be compared with all at a time."""
        each = max(1, _SCORES // max(1, len(self)))
        return [np.asarray(rows[at : at + each]) for at in range(0, len(rows), each)]


class WholeStepLoss(ABC):
    """A loss whose terms are those of texts among all of a step's.

    `facts` say of each text what the loss needs to know: numbers that stay right when texts of other micro-batches come before.
    """

    @property
    def pool(self) -> Pool:
        """Which hidden states of a text are its embedding."""
        return self.pooling  # pyrefly: ignore[missing-attribute]  a field of each loss

    @property
    @abstractmethod
    def stats(self) -> tuple[str, ...]:
        """Names of the further sums in the terms' `stats`."""

    @abstractmethod
    def idle(self) -> Any:
        """Make a tiny batch for a rank without work."""

    @abstractmethod
    def facts(self, batch: Any) -> NDArray[np.int64]:
        """Return what the loss needs to know of each text of a batch: int64[B, F].

        Raises:
            PackedBatchError: the batch is none.
        """

    @abstractmethod
    def asks(self, facts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which texts have a term: bool[N]."""

    @abstractmethod
    def terms(self, texts: StepTexts, rows: NDArray[np.int64]) -> LossTerms:
        """Compute the terms of some texts that have one, among all of the step's."""

    def scale(self, found: Sequence[LossTerms]) -> float | torch.Tensor:  # noqa: ARG002 - most sums stand as they are
        """Return by what every term is multiplied, from the terms of the whole step."""
        return 1.0


class _Known:
    """What was measured of a step before its first term."""

    def __init__(self, texts: StepTexts, begin: int, objective: WholeStepLoss, *, learn: bool) -> None:
        self.texts, self.begin = texts, begin
        self.objective = objective
        rows = np.flatnonzero(objective.asks(texts.facts))
        self.gradients: torch.Tensor | None = None
        embeddings = texts.embeddings.detach().requires_grad_(learn)
        whole = attrs.evolve(texts, embeddings=embeddings)
        gradient, found = torch.zeros_like(texts.embeddings), []
        with torch.set_grad_enabled(learn):
            for part in texts.cut(rows):
                terms = objective.terms(whole, part)
                if learn:
                    gradient += torch.autograd.grad(terms.sum, embeddings)[0]
                found.append(terms._replace(sum=terms.sum.detach(), per_sample=None))
        self.scale = objective.scale(found)
        if learn:
            self.gradients = gradient * self.scale

    def terms(self, mine: slice) -> LossTerms:
        """Return the terms of this shard's texts `mine`, without a graph."""
        stop = self.begin + mine.stop
        here = np.arange(self.begin + mine.start, stop)
        rows = here[self.objective.asks(self.texts.facts)[here]]
        total: torch.Tensor = self.texts.embeddings.new_zeros(())
        stats = dict.fromkeys(self.objective.stats, total)
        with torch.no_grad():
            for part in self.texts.cut(rows):
                found = self.objective.terms(self.texts, part)
                total = total + found.sum
                stats = {name: value + found.stats[name] for name, value in stats.items()}
        return LossTerms(total * self.scale, len(rows), stats)

    def gradient(self, mine: slice) -> torch.Tensor:
        """Return the gradient of the whole step's loss with respect to this shard's texts."""
        assert self.gradients is not None
        return self.gradients[self.begin + mine.start : self.begin + mine.stop]


class BoundWholeStep(BeginsSteps):
    """A `WholeStepLoss` on one model."""

    needs = 0

    def __init__(self, objective: WholeStepLoss, model: nn.Module, device: torch.device) -> None:
        require_packable(model, device=device)
        self._embedder = choose_embedder(model, pooling=objective.pool)
        self._load = RowLoader(model, device)
        self._objective, self._model, self._device = objective, model, device
        self._parallel: Parallel = ALONE
        self._begun = False
        self._batches: list[Any] = []
        self._places: dict[int, slice] = {}
        self._states: dict[int, list[torch.Tensor]] = {}
        self._found: list[torch.Tensor] = []
        self._like: torch.Tensor = torch.zeros(0, 0, device=device)
        self._known: _Known | None = None

    def measure(self, batch: Any) -> Sequence[float]:
        """Return nothing: `begin` measures the step."""
        del batch
        return []

    def begin(self, batches: Sequence[Any | None], parallel: Parallel) -> None:
        """Embed all texts of a step, without gradients, and gather them over the data shards.

        Args:
            batches: this rank's, None where it has nothing and other ranks have: it makes a forward all the same.
            parallel: the ranks.
        """
        self._begun, self._parallel, self._known, self._found = True, parallel, None, []
        # Held, so that an address stands for one of them.
        self._batches = [batch for batch in batches if batch is not None]
        self._places, self._states, places = {}, {}, 0
        for batch in self._batches:
            number = len(batch.row.cu_seqlens) - 1
            self._places[id(batch)] = slice(places, places + number)
            places += number
        if len(batches) == 1:
            return  # which one forward does, with gradients
        with torch.no_grad():
            for batch in batches:
                if batch is None:
                    self._like = self._embed(self._objective.idle())
                    continue
                self._states[id(batch)] = random_state(self._device)
                self._found.append(self._embed(batch))
        self._know()

    def __call__(self, batch: Any, totals: Sequence[float]) -> LossTerms:
        """Compute the terms of a batch's texts among all of the step's.

        Raises:
            LossError: no step was begun, so that nothing is known of the other texts.
        """
        del totals
        if not self._begun:
            raise LossError(
                "the loss is among all texts of a step: before its first micro-batch call begin(micro_batches, "
                "forge_algos.ALONE), or with the strategy of several ranks, as train does"
            )
        place = self._places.get(id(batch))
        if self._known is not None and not self._model.training:
            # An evaluation has embedded every text, and no rank makes another forward.
            return self._known.terms(slice(0, 0) if place is None else place)
        if (state := self._states.get(id(batch))) is not None:
            # The dropout of the first forward, so that the gradient is that of the very loss.
            set_random_state(self._device, state)
        embeddings = self._embed(batch)
        if self._known is None:
            self._like = embeddings.detach()
            self._found = [self._like] if place is not None else []
            self._know()
        assert self._known is not None
        if place is None:
            nothing = embeddings.sum() * 0.0
            return LossTerms(nothing, 0, {name: nothing.detach() for name in self._objective.stats})
        terms = self._known.terms(place)
        if not torch.is_grad_enabled() or not self._model.training:
            return terms
        return terms._replace(sum=_GivenGradient.apply(embeddings, self._known.gradient(place), terms.sum))

    def _embed(self, batch: Any) -> torch.Tensor:
        loaded = self._load(batch.row)
        return self._embedder(loaded.inputs, loaded.boundaries)

    def _know(self) -> None:
        """Gather the texts of all data shards; collective."""
        facts = [self._objective.facts(batch) for batch in self._batches or [self._objective.idle()]]
        mine = StepTexts(
            embeddings=torch.cat(self._found or [self._like[:0]]),
            facts=np.concatenate(facts) if self._batches else facts[0][:0],
        )
        texts, begin = _of_all_shards(mine, self._parallel)
        self._known = _Known(texts, begin, self._objective, learn=self._model.training)
        self._found = []


def _of_all_shards(mine: StepTexts, parallel: Parallel) -> tuple[StepTexts, int]:
    """Return the texts of all data shards, and where this one's begin; collective."""
    if parallel.data_parallel_size == 1:
        return mine, 0
    embeddings, begin = parallel.gather(mine.embeddings)
    facts, _ = parallel.gather(torch.from_numpy(mine.facts))
    return StepTexts(embeddings=embeddings, facts=facts.numpy()), begin


class _GivenGradient(torch.autograd.Function):
    """(embeddings, their gradient, a loss) → the loss, whose backward pass gives them that."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, embeddings: torch.Tensor, gradient: torch.Tensor, loss: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(gradient.to(embeddings))
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return grad_outputs[0] * gradient, None, None


def random_state(device: torch.device) -> list[torch.Tensor]:
    """Return the states from which dropout is drawn: the host's, and the device's own."""
    own = [] if torch.device(device).type == "cpu" else [torch.get_device_module(device).get_rng_state(device)]
    return [torch.get_rng_state(), *own]


def set_random_state(device: torch.device, state: list[torch.Tensor]) -> None:
    host, *own = state
    torch.set_rng_state(host)
    for each in own:
        torch.get_device_module(device).set_rng_state(each, device)
