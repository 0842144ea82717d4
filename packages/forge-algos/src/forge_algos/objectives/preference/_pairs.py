"""Base classes of objectives on pairs of completions, and the batch that they read."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos.batches._copies import to_device
from forge_algos.batches._groups import PackedGroups, check_groups, idle_groups
from forge_algos.batches._learned import token_count
from forge_algos.batches._packed import require
from forge_algos.heads._completions import Completions, sum_by_completion
from forge_algos.losses import LossTerms
from forge_algos.objectives._mean import Mean


@attrs.frozen(kw_only=True, eq=False)
class PreferenceBatch:
    """P pairs of completions in one row, and numbers that were computed or annotated for them."""

    groups: PackedGroups
    """P groups of two completions: the chosen one, then the rejected one."""
    ref_logps: NDArray[np.float32] | None = None
    """float32[2P]: log-probabilities of the completions under the reference, in nats,
    as `reference_logps` gives them."""
    margins: NDArray[np.float32] | None = None
    """float32[P]: by how much the chosen completion's reward should exceed the other's;
    read by `Reward`."""


class Pairwise:
    """Counts and figures of an objective on pairs; terms and samples are pairs."""

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "pairs"

    shown: ClassVar[dict[str, str]] = {
        "accuracy": "correct",
        "margin": "margins",
        "chosen_reward": "chosen_rewards",
        "rejected_reward": "rejected_rewards",
    }
    """Figure → stat that it is the mean of."""

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the further sums in the terms' `stats`."""
        return tuple(self.shown.values())

    def count(self, batch: PreferenceBatch) -> int:
        """Count the pairs of a batch, without a forward."""
        require(batch, "groups", "a PreferenceBatch")
        if not len(batch.groups.group_sizes):
            return 0
        check_pairs(batch)
        return len(batch.groups.group_sizes)

    def samples(self, batch: PreferenceBatch) -> int:
        """Count the pairs of a batch."""
        return len(batch.groups.group_sizes)

    def tokens(self, batch: PreferenceBatch) -> int:
        """Count the tokens of the row, prompts included.
        What pairs share counts for each of them.
        """
        return token_count(batch.groups)

    def idle(self) -> PreferenceBatch:
        """Make a batch of one made-up pair."""
        return PreferenceBatch(groups=idle_groups((2,)), ref_logps=np.zeros(2, np.float32))

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide by the number of pairs: `accuracy` (chosen has the larger reward), margin, rewards."""
        return {name: sums[stat] / count for name, stat in self.shown.items()}


class Pairs(NamedTuple):
    """Log-probabilities of P pairs under the model, in nats, and their numbers of tokens."""

    chosen: torch.Tensor
    """float32[P], with gradients."""
    rejected: torch.Tensor
    """float32[P], with gradients."""
    chosen_lengths: torch.Tensor
    """int64[P], on the CPU."""
    rejected_lengths: torch.Tensor
    """int64[P], on the CPU."""
    tokens_per_pair: float | None = None
    """Chosen tokens a pair over the whole step, where the objective asks for it and `normalize` is "global"."""


class PairObjective(Pairwise, ABC):
    """Base class of an objective on the log-probabilities of pairs; a subclass brings `terms`.

    One forward a row. Batches are `PreferenceBatch`. `terms` returns `chosen_rewards`, `rejected_rewards`, `margins` and
    `correct` among its stats, or the subclass names others in `shown`.
    """

    @property
    def normalize(self) -> str:
        """Mean that the loss is: "global" or "trl".
        That is over the step's pairs, or of the micro-batches' own means.
        """
        return "global"

    @property
    def per_token(self) -> bool:
        """Whether a part of the loss is a mean over tokens: it reads `tokens_per_pair`."""
        return False

    def bind(self, model: nn.Module, *, device: torch.device) -> "BoundPairs":
        """Choose how this model is run.

        Raises:
            PackedBatchError: the model does not keep the completions of a row apart.
            AdapterError: virtual tokens that the model cannot be given.
        """
        return BoundPairs(self, model, device)

    @abstractmethod
    def terms(self, pairs: Pairs, batch: PreferenceBatch) -> LossTerms:
        """Compute the summed loss of the pairs of one batch; gradients run back into `pairs`."""


class BoundPairs:
    """A `PairObjective` on one model."""

    def __init__(self, objective: PairObjective, model: nn.Module, device: torch.device) -> None:
        """Choose how the head is scored."""
        self.policy = Completions(model, device=device)
        self._objective = objective
        self._mean = Mean(objective.normalize, per_token=objective.per_token)
        self.needs = self._mean.needs

    def measure(self, batch: PreferenceBatch) -> Sequence[float]:
        """Return the numbers of this row that the mean of means divides by."""
        return self._mean.measure(len(batch.groups.group_sizes), chosen_tokens(batch.groups))

    def __call__(self, batch: PreferenceBatch, totals: Sequence[float]) -> LossTerms:
        """Compute the batch's terms."""
        check_pairs(batch)
        chosen, rejected = sides(sum_by_completion(self.policy.tokens(batch.groups), batch.groups))
        pairs = Pairs(chosen, rejected, **lengths(batch.groups), tokens_per_pair=self._mean.tokens_per_term(totals))
        return self._mean(self._objective.terms(pairs, batch), totals)


def check_pairs(batch: PreferenceBatch) -> None:
    """Raise PackedBatchError if the row does not hold pairs, or an array has another length."""
    require(batch, "groups", "a PreferenceBatch")
    check_groups(batch.groups)
    sizes = np.asarray(batch.groups.group_sizes)
    if (sizes != 2).any():
        where = int(np.flatnonzero(sizes != 2)[0])
        raise PackedBatchError(
            f"a preference is between two completions, chosen and rejected; group {where} holds {int(sizes[where])}"
        )
    for name, wanted in (("ref_logps", 2 * len(sizes)), ("margins", len(sizes))):
        found: Any = getattr(batch, name)
        if found is not None and np.shape(found) != (wanted,):
            raise PackedBatchError(f"{name}: {wanted} numbers are wanted for {len(sizes)} pairs, got {list(np.shape(found))}")


def sides(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Split values[2P], which alternate, into (chosen[P], rejected[P])."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


def sum_pairs(tokens: torch.Tensor, groups: PackedGroups, *, ld_alpha: float) -> torch.Tensor:
    """Sum the log-probabilities of pairs, float32[M], to float32[2P].

    LD-DPO (arXiv 2409.06411): tokens up to the length of the shorter completion count whole, those beyond by `ld_alpha`.
    """
    counts = np.asarray(groups.lengths)
    if (np.asarray(groups.group_sizes) != 2).any():
        raise PackedBatchError(
            "ld_alpha weighs what one completion of a pair is longer than the other: groups of two are wanted"
        )
    shorter = np.repeat(counts.reshape(-1, 2).min(1), 2)
    places = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    weights = np.where(places < np.repeat(shorter, counts), 1.0, ld_alpha)
    return sum_by_completion(tokens * to_device(weights, tokens.device, tokens.dtype), groups)


def lengths(groups: PackedGroups) -> dict[str, torch.Tensor]:
    """Count the learned tokens of both sides, int64[P] each, under the losses' argument names."""
    chosen, rejected = sides(torch.tensor(np.asarray(groups.lengths), dtype=torch.int64))
    return {"chosen_lengths": chosen, "rejected_lengths": rejected}


def chosen_tokens(groups: PackedGroups) -> int:
    """Count the learned tokens of the chosen completions; an empty one counts as one token."""
    return int(np.maximum(np.asarray(groups.lengths)[::2], 1).sum())
