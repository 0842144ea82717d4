"""A packed row → what is learned in it, and whether it is one at all.

The row comes from whoever packs (forge_packing here); rooms agree by shape, so this file says the shape.
"""

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import PackedBatchError

IGNORE = -100


class PackedBatch(Protocol):
    """One flat padding-free row of T tokens in B documents; numpy arrays of any integer dtype."""

    @property
    def input_ids(self) -> NDArray[Any]:
        """int[T]: the documents' tokens, one document after another."""
        ...

    @property
    def labels(self) -> NDArray[Any]:
        """int[T]: the token itself where it is learned, -100 where it is not; a document's first is never learned."""
        ...

    @property
    def position_ids(self) -> NDArray[Any]:
        """int[T]: 0, 1, 2, ... within each document."""
        ...

    @property
    def cu_seqlens(self) -> NDArray[Any]:
        """int[B+1]: where documents begin, and T at the end."""
        ...

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest document."""
        ...


def next_tokens(batch: PackedBatch) -> NDArray[np.int64]:
    """The label of the token that follows within the same document: int64[T], -100 where nothing is learned.

    The last position of a document predicts nothing, whatever the first label of the next document says.
    """
    labels = np.asarray(batch.labels)
    targets = np.full(len(labels), IGNORE, dtype=np.int64)
    targets[:-1] = labels[1:]
    ends = np.asarray(batch.cu_seqlens)[1:]
    targets[ends[ends > 0] - 1] = IGNORE
    return targets


def token_count(batch: PackedBatch) -> int:
    """T."""
    return len(batch.input_ids)


def sample_count(batch: PackedBatch) -> int:
    """B."""
    return max(0, len(batch.cu_seqlens) - 1)


def check_batch(batch: PackedBatch, vocabulary: int | None = None) -> None:
    """Raise PackedBatchError if the arrays do not describe one row of documents with ids in [0, vocabulary)."""
    ids, labels, positions = (np.asarray(a) for a in (batch.input_ids, batch.labels, batch.position_ids))
    cu = np.asarray(batch.cu_seqlens)
    if not ids.shape == labels.shape == positions.shape or ids.ndim != 1:
        raise PackedBatchError(
            "a packed row needs input_ids, labels and position_ids of one shape [T], "
            f"got {list(ids.shape)}, {list(labels.shape)} and {list(positions.shape)}"
        )
    if cu.ndim != 1 or len(cu) < 2 or cu[0] != 0 or cu[-1] != len(ids) or (np.diff(cu) < 1).any():
        raise PackedBatchError(f"cu_seqlens must rise from 0 to the row's {len(ids)} tokens, got {_short(cu)}")
    steps = np.diff(positions)
    steps[cu[1:-1] - 1] = 1
    if positions[cu[:-1]].any() or (steps != 1).any():
        raise PackedBatchError("position_ids must count 0, 1, 2, ... anew in every document that cu_seqlens names")
    longest = int(np.diff(cu).max())
    if batch.max_seqlen < longest:
        raise PackedBatchError(f"max_seqlen is {batch.max_seqlen}, but the longest document has {longest} tokens")
    if vocabulary is not None:
        learned = labels[labels != IGNORE]
        for name, values in (("input_ids", ids), ("labels", learned)):
            if values.size and not 0 <= values.min() <= values.max() < vocabulary:
                wrong = values[(values < 0) | (values >= vocabulary)][0]
                raise PackedBatchError(
                    f"{name} holds the token id {wrong}, but the model's vocabulary ends at {vocabulary - 1}: "
                    "the data was tokenised for another model"
                )


def _short(values: NDArray[Any]) -> str:
    return np.array2string(values, threshold=8, edgeitems=3, separator=", ")
