"""Batch of self-distillation: the same completions after the prompts of both."""

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import PackedBatchError
from forge_algos.batches._groups import PackedGroups, check_groups, idle_groups


@attrs.frozen(kw_only=True, eq=False)
class TaughtBatch:
    """B completions with M tokens, twice: as the student was asked, and as the teacher is."""

    groups: PackedGroups
    """Row of the student: its prompts with the completions."""
    teacher: PackedGroups
    """Row of the teacher: prompts of its own with the same completions, in the same order."""
    kept: NDArray[np.int64]
    """int64[K]: those of the M tokens that are learned from, ascending."""
    finished: NDArray[np.bool_]
    """bool[B]: whether a completion ended by itself; read by the figures alone."""


def check_taught(batch: TaughtBatch) -> None:
    """Raise PackedBatchError unless both rows are whole and hold the same completions."""
    check_groups(batch.groups)
    check_groups(batch.teacher)
    if not np.array_equal(batch.groups.targets, batch.teacher.targets) or not np.array_equal(
        batch.groups.lengths, batch.teacher.lengths
    ):
        raise PackedBatchError("the student's row and the teacher's hold different completions; both are of the same samples")
    kept = np.asarray(batch.kept)
    if len(kept) and (kept.min() < 0 or kept.max() >= len(batch.groups.rows) or (np.diff(kept) < 1).any()):
        raise PackedBatchError(f"kept: ascending numbers of the row's {len(batch.groups.rows)} tokens are wanted")
    if len(batch.finished) != len(batch.groups.lengths):
        raise PackedBatchError(f"finished: {len(batch.groups.lengths)} flags are wanted, got {len(batch.finished)}")


def idle_taught() -> TaughtBatch:
    """Make a completion of one token, for a rank without work."""
    row = idle_groups((1,))
    return TaughtBatch(groups=row, teacher=row, kept=np.zeros(1, np.int64), finished=np.zeros(1, bool))
