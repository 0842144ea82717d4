"""Batch of distillation from stored numbers: a row with a teacher's likeliest tokens."""

import attrs
import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import PackedBatchError
from forge_algos.batches._packed import IGNORE, PackedBatch, next_tokens


@attrs.frozen(kw_only=True, eq=False)
class TopBatch:
    """A packed row with M learned tokens, and what a teacher expects in the place of each."""

    row: PackedBatch
    ids: NDArray[np.int32]
    """int32[M, K]: the teacher's likeliest tokens, in the order of the row's learned tokens; the first is always one."""
    logps: NDArray[np.float32]
    """float32[M, K]: their log-probabilities, -inf where a position has fewer than K."""
    rest: NDArray[np.float32]
    """float32[M]: log of the probability of all other tokens together; -inf for none."""


def check_top(batch: TopBatch, vocabulary: int | None) -> None:
    """Raise PackedBatchError unless each learned token has the teacher's, of this vocabulary.

    The row itself is checked as it is loaded.
    """
    learned = int(np.count_nonzero(next_tokens(batch.row) != IGNORE))
    ids, logps, rest = batch.ids, batch.logps, batch.rest
    if ids.ndim != 2 or ids.shape != logps.shape or len(ids) != learned or rest.shape != (learned,) or not ids.shape[1]:
        raise PackedBatchError(
            f"the row has {learned} learned tokens, and the teacher ids {list(ids.shape)}, logps {list(logps.shape)} and rest "
            f"{list(rest.shape)}: [{learned}, K] twice and [{learned}] are wanted"
        )
    if not ((logps < np.inf).all() and (rest < np.inf).all()):
        raise PackedBatchError("logps and rest must be numbers, or -inf for no probability; some are NaN or infinite")
    known = ~np.isneginf(logps)
    if not known[:, 0].all():
        raise PackedBatchError("logps: the first of each position must be a token's, not -inf")
    if learned and (ids.min() < 0 or (vocabulary is not None and ids[known].max() >= vocabulary)):
        raise PackedBatchError(f"ids: the teacher's tokens go up to {int(ids.max())}, and the vocabulary has {vocabulary}")
