"""Packed rows of documents: their protocol, checks, and the arguments of a forward.

Rows come from a packer, such as forge_packing; packages agree by shape, so this file states the shape.
"""

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from forge_algos._errors import PackedBatchError

IGNORE = -100


class PackedBatch(Protocol):
    """Flat padding-free row of T tokens in B documents.
    Arrays are numpy's, of any integer dtype.

    It may have `weights` too: float[T] from 0, by how much the loss term of each token counts, or None where each counts 1.
    And `media_inputs`, a function that gives for each document the arguments of a forward that a processor makes of its images
    (`batches.MediaInputs`), or None; it is called right before the forward, as pixels are many.
    """

    @property
    def input_ids(self) -> NDArray[Any]:
        """int[T]: the documents' tokens, one document after another."""
        ...

    @property
    def labels(self) -> NDArray[Any]:
        """int[T]: the token itself where it is learned, else -100, as is each document's first."""
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
    """Shift labels to the positions that predict them: int64[T], -100 where nothing is learned.

    The last position of a document predicts nothing, whatever the first label of the next document is.
    """
    labels = np.asarray(batch.labels)
    targets = np.full(len(labels), IGNORE, dtype=np.int64)
    targets[:-1] = labels[1:]
    ends = np.asarray(batch.cu_seqlens)[1:]
    targets[ends[ends > 0] - 1] = IGNORE
    return targets


def token_weights(batch: PackedBatch, rows: NDArray[np.int64]) -> NDArray[np.float32] | None:
    """Return the weights float32[M] of the tokens that follow positions `rows`, or None."""
    weights = getattr(batch, "weights", None)
    return None if weights is None else np.asarray(weights, dtype=np.float32)[rows + 1]


def require(batch: Any, name: str, wanted: str) -> None:
    """Raise PackedBatchError for a batch of another kind than is `wanted`: it has no `name`."""
    if not hasattr(batch, name):
        raise PackedBatchError(f"{wanted} is wanted, not {type(batch).__name__}, which has no {name}")


def check_batch(batch: PackedBatch, vocabulary: int | None = None) -> None:
    """Raise PackedBatchError if the arrays are no row of documents with ids below `vocabulary`."""
    require(batch, "labels", "a packed row")
    ids, labels, positions = (np.asarray(a) for a in (batch.input_ids, batch.labels, batch.position_ids))
    cu = np.asarray(batch.cu_seqlens)
    refuse_empty(ids)
    check_integers(input_ids=ids, labels=labels, position_ids=positions, cu_seqlens=cu)
    if not ids.shape == labels.shape == positions.shape or ids.ndim != 1:
        raise PackedBatchError(
            "a packed row needs input_ids, labels and position_ids of one shape [T], "
            f"got {list(ids.shape)}, {list(labels.shape)} and {list(positions.shape)}"
        )
    if cu.ndim != 1 or len(cu) < 2 or cu[0] != 0 or cu[-1] != len(ids) or (cu[1:] <= cu[:-1]).any():
        raise PackedBatchError(f"cu_seqlens must rise from 0 to the row's {len(ids)} tokens, got {_short(cu)}")
    steps = positions[1:] - positions[:-1]
    steps[cu[1:-1] - 1] = 1
    if positions[cu[:-1]].any() or (steps != 1).any():
        raise PackedBatchError("position_ids must count 0, 1, 2, ... anew in every document that cu_seqlens names")
    longest = int((cu[1:] - cu[:-1]).max())
    if batch.max_seqlen < longest:
        raise PackedBatchError(f"max_seqlen is {batch.max_seqlen}, but the longest document has {longest} tokens")
    weights = getattr(batch, "weights", None)
    if weights is not None:
        weights = np.asarray(weights)
        if weights.shape != ids.shape or not (np.isfinite(weights) & (weights >= 0)).all():
            raise PackedBatchError(
                f"weights must be finite numbers from 0, one for each of the {len(ids)} tokens, got {_short(weights)}"
            )
    if vocabulary is not None:
        learned = labels[labels != IGNORE]
        for name, values in (("input_ids", ids), ("labels", learned)):
            if values.size and not 0 <= values.min() <= values.max() < vocabulary:
                wrong = values[(values < 0) | (values >= vocabulary)][0]
                raise PackedBatchError(
                    f"{name} holds the token id {wrong}, but the model's vocabulary ends at {vocabulary - 1}: "
                    "the data was tokenised for another model"
                )


def refuse_empty(ids: ArrayLike) -> None:
    """Raise PackedBatchError for a row of no tokens.

    A packer gives it to a rank without work, and no model can run it.
    """
    if not np.size(ids):
        raise PackedBatchError(
            "a row of no tokens, as a rank without work has it, cannot be run: run the objective's `idle()` in its place, and "
            "multiply the loss by 0"
        )


def check_integers(**arrays: NDArray[Any]) -> None:
    """Raise PackedBatchError for arrays of other numbers, which would be cut to integers."""
    for name, array in arrays.items():
        if array.size and array.dtype.kind not in "iu":
            raise PackedBatchError(f"{name} must be an array of integers, got {array.dtype}{list(array.shape)}")


def _short(values: NDArray[Any]) -> str:
    return np.array2string(values, threshold=8, edgeitems=3, separator=", ")


def packed_inputs(ids: torch.Tensor, positions: torch.Tensor, boundaries: torch.Tensor, longest: int) -> dict[str, Any]:
    """Build the forward's arguments for one packed row, without cache and mask.

    Args:
        ids: int64[T].
        positions: int64[T].
        boundaries: int[B+1], where documents begin, and T.
        longest: tokens of the longest document.
    """
    boundaries = boundaries.to(ids.device, torch.int32, non_blocking=True)
    return {
        "input_ids": ids[None],
        "position_ids": positions[None],
        "use_cache": False,
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
    }
