"""Base classes of objectives on the learned tokens of packed rows."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos.batches._learned import AnyRow, LearnedRow, RowLoader, loss_count, sample_count, token_count
from forge_algos.batches._packed import IGNORE, PackedBatch
from forge_algos.heads._head import Head, choose_head
from forge_algos.heads._packable import require_packable
from forge_algos.losses import LossTerms
from forge_algos.objectives._mean import Mean
from forge_algos.objectives._objective import LoadsBatches


class _Row(NamedTuple):
    """A `PackedBatch`."""

    input_ids: NDArray[Any]
    labels: NDArray[Any]
    position_ids: NDArray[Any]
    cu_seqlens: NDArray[Any]
    max_seqlen: int


class LearnedTokens:
    """Counts of an objective on learned tokens; samples are documents, or groups of them.

    Where tokens have weights, each counts as often as its weight says, in the sum and in the count.
    """

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "tokens"

    def count(self, batch: AnyRow) -> float:
        """Add up the weights of a row's learned tokens, without a forward; an empty row has none."""
        return loss_count(batch)

    def samples(self, batch: AnyRow) -> int:
        """Count the documents of a row, or its groups."""
        return sample_count(batch)

    def tokens(self, batch: AnyRow) -> int:
        """Count all tokens of a row, learned or not.
        A prefix that samples share counts for each of them.
        """
        return token_count(batch)

    def idle(self) -> PackedBatch:
        """Make a row of one document with two tokens, the second learned.
        Their id 0 is in every vocabulary.
        """
        return _Row(
            input_ids=np.zeros(2, np.int64),
            labels=np.array([IGNORE, 0]),
            position_ids=np.arange(2),
            cu_seqlens=np.array([0, 2]),
            max_seqlen=2,
        )


class TokenObjective(LearnedTokens, ABC):
    """Base class of an objective on learned tokens of packed rows; a subclass brings `terms`.

    It brings `stats` too where it reports more than a loss. Batches are packed rows with labels (`PackedBatch`), or of groups
    (`PackedGroups`: samples or the turns of conversations, whose prefix may be shared). The forward
    gets `use_cache=False`, no mask, positions that start anew in each document, and `cu_seq_lens_q/k` (int32[B+1]) with
    `max_length_q/k`, which variable-length attention reads; sdpa and eager go by the positions.
    """

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the further sums in the terms' `stats`."""
        return ()

    @property
    def normalize(self) -> str:
        """Mean that the loss is: "global" or "trl".
        That is over the step's learned tokens, or of the micro-batches' own means.
        """
        return "global"

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide each of `stats` by the number of learned tokens."""
        return {name: sums[name] / count for name in self.stats}

    def bind(self, model: nn.Module, *, device: torch.device) -> "BoundTokens":
        """Choose how this model's head is scored; `objectives.choose_head` gives the reason.

        Raises:
            PackedBatchError: the model does not keep the documents of a packed row apart, tried on two made-up ones.
            AdapterError: virtual tokens that the model cannot be given.
        """
        require_packable(model, device=device)
        return BoundTokens(self, model, device)

    @abstractmethod
    def terms(self, head: Head, row: LearnedRow) -> LossTerms:
        """Compute the summed loss of one row in one forward: call one of `head`'s methods.

        Args:
            head: scores positions of the model, `head.logps(row.inputs, row.rows, row.targets)` for instance.
            row: the forward's arguments, the positions int64[M] to be scored, the tokens int64[M] that follow them, and their
                weights float32[M], if any.

        Returns:
            LossTerms: the weighted sum over the M learned tokens, the sum of their weights, and a sum for each name of `stats`.
        """


class BoundTokens(LoadsBatches):
    """A `TokenObjective` on one model."""

    def __init__(self, objective: TokenObjective, model: nn.Module, device: torch.device) -> None:
        """Choose how the head is scored."""
        self.head = choose_head(model, device=device)
        self._objective = objective
        self._mean = Mean(objective.normalize)
        self._load = RowLoader(model, device)
        self.needs = self._mean.needs

    def measure(self, batch: AnyRow) -> Sequence[float]:
        """Return the numbers of this row that the mean of means divides by."""
        return self._mean.measure(self._objective.count(batch))

    def load(self, batch: AnyRow) -> LearnedRow:
        """Return the row on the device.

        Raises:
            PackedBatchError: the arrays are no row, or hold an id that the model does not have.
        """
        return self._load(batch)

    def __call__(self, batch: AnyRow | LearnedRow, totals: Sequence[float]) -> LossTerms:
        """Compute the row's terms."""
        row = batch if isinstance(batch, LearnedRow) else self._load(batch)
        return self._mean(self._objective.terms(self.head, row), totals)
