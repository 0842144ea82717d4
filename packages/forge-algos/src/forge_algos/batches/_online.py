"""Batch of the online methods: a packed row of completions, and the rollout's arrays for it."""

from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import PackedBatchError
from forge_algos.batches._groups import PackedGroups, check_groups, idle_groups
from forge_algos.batches._packed import require

Floats = NDArray[np.float32]


@attrs.frozen(kw_only=True, eq=False)
class OnlineBatch:
    """B completions in a packed row with M learned tokens, and the rollout's numbers for them."""

    groups: PackedGroups
    """The row."""
    old_logps: Floats
    """float32[M]: log-probabilities under the policy that sampled, in nats."""
    advantages: Floats
    """float32[M]; the same for all tokens of a completion, except in PPO."""
    rewards: Floats
    """float32[B]; read by the figures alone."""
    masked: int = 0
    """Completions of the step that have no term and count in a mean over completions:
    those of the whole step, in one of its batches."""
    ref_logps: Floats | None = None
    """float32[M], where there is a reference."""
    returns: Floats | None = None
    """float32[M], for a value head."""
    old_values: Floats | None = None
    """float32[M], for a value head."""
    kept: NDArray[np.bool_] | None = None
    """bool[M]: tokens with a term of the policy and of its entropy; others have that of their KL alone,
    and count all the same. None is all."""
    lots: NDArray[np.float64] | None = None
    """float64[M]: a number of each token by lot, the same however the step is cut, for losses that choose among its tokens."""


def check_online(batch: OnlineBatch, *wanted: str) -> None:
    """Raise PackedBatchError if the row is malformed, or an array is missing or of wrong length."""
    require(batch, "groups", "an OnlineBatch")
    check_groups(batch.groups)
    B, M = len(batch.groups.lengths), len(batch.groups.rows)
    if B and np.asarray(batch.groups.lengths).min() < 1:
        raise PackedBatchError(
            "a sampled completion has at least one token, and all of its tokens are learned; one here has none"
        )
    for name in ("old_logps", "advantages", "rewards", "ref_logps", "returns", "old_values", "kept", "lots"):
        found: Any = getattr(batch, name)
        size = B if name == "rewards" else M
        if found is None and name in ("old_logps", "advantages", "rewards", *wanted):
            raise PackedBatchError(f"{name} is missing, and the objective reads it: was the rollout made for these settings?")
        if found is not None and np.shape(found) != (size,):
            raise PackedBatchError(
                f"{name}: {size} numbers are wanted for {B} completions of {M} tokens, got {list(np.shape(found))}"
            )


def idle_online() -> OnlineBatch:
    """Make two completions of a token each, for a rank without work."""
    nothing = np.zeros(2, np.float32)
    return OnlineBatch(
        groups=idle_groups((2,)),
        old_logps=nothing,
        advantages=nothing,
        rewards=nothing,
        ref_logps=nothing,
        returns=nothing,
        old_values=nothing,
        lots=nothing.astype(np.float64),
    )
