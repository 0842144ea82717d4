"""Pairs of a better and a worse completion in packed rows: the batch, and what every objective on pairs says of it alike."""

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
import torch
from numpy.typing import NDArray

from forge_algos._errors import PackedBatchError
from forge_algos.batches._groups import PackedGroups, check_groups, idle_groups


@attrs.frozen(kw_only=True, eq=False)
class PreferenceBatch:
    """P pairs of completions in one row, and what was computed or written down for them beforehand."""

    groups: PackedGroups
    """P groups of two completions: the chosen one, then the rejected one."""
    ref_logps: NDArray[np.float32] | None = None
    """float32[2P]: log-probabilities of the completions under the reference, in nats, as `reference_logps` gives them."""
    ref_tail_logps: NDArray[np.float32] | None = None
    """float32[2P]: the part beyond the length of the shorter completion of the pair; read by `ld_alpha`."""
    margins: NDArray[np.float32] | None = None
    """float32[P]: by how much the chosen completion's reward should exceed the other's; read by `Reward`."""


class Pairwise:
    """What `train` asks of an objective on pairs and does not depend on its loss."""

    @property
    def unit(self) -> str:
        """What `count` counts."""
        return "pairs"

    shown: ClassVar[dict[str, str]] = {
        "accuracy": "correct",
        "margin": "margins",
        "chosen_reward": "chosen_rewards",
        "rejected_reward": "rejected_rewards",
    }
    """Figures by the stats that they are means of."""

    @property
    def stats(self) -> tuple[str, ...]:
        """The sums behind the figures."""
        return tuple(self.shown.values())

    def count(self, batch: PreferenceBatch) -> int:
        """P, without a forward."""
        if not len(batch.groups.group_sizes):
            return 0
        check_pairs(batch)
        return len(batch.groups.group_sizes)

    def samples(self, batch: PreferenceBatch) -> int:
        """P."""
        return len(batch.groups.group_sizes)

    def tokens(self, batch: PreferenceBatch) -> int:
        """Tokens of the row."""
        return len(batch.groups.input_ids)

    def idle(self) -> PreferenceBatch:
        """One made-up pair."""
        nothing = np.zeros(2, np.float32)
        return PreferenceBatch(groups=idle_groups((2,)), ref_logps=nothing, ref_tail_logps=nothing)

    def figures(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Means over pairs: `accuracy` (the chosen completion has the larger reward), `margin`, and the rewards."""
        return {name: sums[stat] / count for name, stat in self.shown.items()}


def check_pairs(batch: PreferenceBatch) -> None:
    """Raise PackedBatchError if the row does not hold pairs, or an array beside it is of another length."""
    check_groups(batch.groups)
    sizes = np.asarray(batch.groups.group_sizes)
    if (sizes != 2).any():
        where = int(np.flatnonzero(sizes != 2)[0])
        raise PackedBatchError(
            f"a preference is between two completions, chosen and rejected; group {where} holds {int(sizes[where])}"
        )
    for name, wanted in (("ref_logps", 2 * len(sizes)), ("ref_tail_logps", 2 * len(sizes)), ("margins", len(sizes))):
        found: Any = getattr(batch, name)
        if found is not None and np.shape(found) != (wanted,):
            raise PackedBatchError(f"{name}: {wanted} numbers are wanted for {len(sizes)} pairs, got {list(np.shape(found))}")


def sides(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(chosen[P], rejected[P]) of values[2P] that alternate."""
    chosen, rejected = values.view(-1, 2).unbind(1)
    return chosen, rejected


def lengths(groups: PackedGroups) -> dict[str, torch.Tensor]:
    """Learned tokens of both sides, int64[P] each, under the losses' names."""
    chosen, rejected = sides(torch.tensor(np.asarray(groups.lengths), dtype=torch.int64))
    return {"chosen_lengths": chosen, "rejected_lengths": rejected}


def chosen_tokens(groups: PackedGroups) -> int:
    """Learned tokens of the chosen completions."""
    return int(np.maximum(np.asarray(groups.lengths)[::2], 1).sum())
