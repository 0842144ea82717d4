"""Collation: samples → one flat, padding-free row, a PackedBatch."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from forge_packing._checks import MAX_TOKENS, Int64Array
from forge_packing._counted import counted
from forge_packing._errors import PackingError

IGNORE = -100
"""The label of a token that no loss is counted for, as in torch and transformers."""


class Example(Protocol):
    """Object with `input_ids` and `labels`: lists, arrays or slices of a memory map.

    It may have `weights` too: S numbers from 0, by which the loss term of each token counts, or None where each counts 1.
    """

    @property
    def input_ids(self) -> Any:
        """S token ids."""

    @property
    def labels(self) -> Any:
        """S labels, not shifted; -100 where no loss is counted."""


AnyExample = Example | tuple[Sequence[int] | npt.ArrayLike, Sequence[int] | npt.ArrayLike]
"""An example, or a pair of input_ids and labels."""


@attrs.frozen(kw_only=True, eq=False)
class PackedBatch:
    """One flat row of B samples, one after another, T tokens in all.

    Token ids and labels are int64, so that torch.from_numpy gives embeddings and losses their dtype without a copy.
    """

    input_ids: Int64Array
    """int64[T]: token ids."""
    labels: Int64Array
    """int64[T]: labels, not shifted; -100 where no loss is counted, and at the first token of every sample, which would
    otherwise be predicted from the last token of another sample."""
    position_ids: Int64Array
    """int64[T]: 0, 1, 2, ..., restarting in every sample."""
    cu_seqlens: npt.NDArray[np.int32]
    """int32[B+1]: the first position of each sample, and T at the end."""
    max_seqlen: int
    """Tokens in the longest sample; 0 in an empty row."""
    weights: npt.NDArray[np.float32] | None = None
    """float32[T]: by how much the loss term of each token counts, 0 where no loss is counted; the loss is the weighted sum
    divided by the sum of the weights. None where no example has weights: each term counts 1."""


def collate(examples: Iterable[AnyExample]) -> PackedBatch:
    """Pack examples into one flat row.

    No examples give an empty row (cu_seqlens is [0]): a rank without work in this pass. The examples are not changed.

    Args:
        examples: Objects with `input_ids` and `labels`, and `weights` where tokens count differently; or pairs of the two.

    Raises:
        PackingError: an example is empty, not of integers, or its lengths differ; negative token ids, and negative labels
            other than -100; labels that are shifted, each the next token; weights that are negative or not finite.


    >>> batch = collate([([5, 6, 7], [5, 6, 7]), ([8, 9], [-100, 9])])
    >>> batch.labels.tolist(), batch.position_ids.tolist(), batch.cu_seqlens.tolist()
    ([-100, 6, 7, -100, 9], [0, 1, 2, 0, 1], [0, 3, 5])
    """
    ids: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    weights: list[np.ndarray | None] = []
    for index, example in enumerate(examples):
        these_ids, these_labels, these_weights = example_arrays(index, example)
        ids.append(these_ids)
        labels.append(these_labels)
        weights.append(these_weights)
    lengths = np.array([array.size for array in ids], dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if ends.size else 0
    if total > MAX_TOKENS:
        raise PackingError(f"{total} tokens are too many for one row: cu_seqlens is int32, so at most {MAX_TOKENS}")
    starts = ends - lengths
    flat_ids, flat_labels = concatenated(ids), concatenated(labels)
    _check_tokens(flat_ids, flat_labels, starts)
    flat_labels[starts] = IGNORE
    _refuse_shifted(flat_ids, flat_labels, ends)
    return PackedBatch(
        input_ids=flat_ids,
        labels=flat_labels,
        position_ids=np.arange(total, dtype=np.int64) - np.repeat(starts, lengths),
        cu_seqlens=np.append(starts, total).astype(np.int32),
        max_seqlen=int(lengths.max()) if lengths.size else 0,
        weights=_flat_weights(weights, lengths, flat_labels),
    )


def _check_tokens(ids_T: Int64Array, labels_T: Int64Array, starts_B: Int64Array) -> None:
    """Raise PackingError for negative token ids, and negative labels other than -100."""
    for name, values, bad in (
        ("input_ids", ids_T, ids_T < 0),
        ("labels", labels_T, (labels_T < 0) & (labels_T != IGNORE)),
    ):
        if bad.any():
            at = int(bad.argmax())
            index = int(np.searchsorted(starts_B, at, side="right")) - 1
            wanted = "a token id, from 0" if name == "input_ids" else f"a token id, or {IGNORE} where no loss is counted"
            raise PackingError(f"example {index}: {name}[{at - starts_B[index]}] is {values[at]}; it must be {wanted}")


_SHIFTED = 4
"""Learned tokens from which on labels that are all the next token are no accident."""


def _refuse_shifted(ids_T: Int64Array, labels_T: Int64Array, ends_B: Int64Array) -> None:
    """Raise PackingError where all labels are the next token of their sample.

    The loss would shift them once more.
    """
    learned = np.flatnonzero(labels_T != IGNORE)
    if learned.size < _SHIFTED or np.array_equal(labels_T[learned], ids_T[learned]):
        return
    next_T = np.append(ids_T[1:], IGNORE)
    next_T[ends_B - 1] = IGNORE
    if np.array_equal(labels_T[learned], next_T[learned]):
        raise PackingError(
            "the labels are shifted, each is the next token: give labels[t] == input_ids[t] or -100, for the loss does "
            "the shifting"
        )


def _flat_weights(
    weights: list[np.ndarray | None], lengths: Int64Array, flat_labels: Int64Array
) -> npt.NDArray[np.float32] | None:
    """Concatenate the examples' weights, 1 where one has none: float32[T]; None where none has."""
    if all(each is None for each in weights):
        return None
    pieces = [np.ones(size, np.float32) if each is None else each for each, size in zip(weights, lengths, strict=True)]
    return np.where(flat_labels == IGNORE, np.float32(0), np.concatenate(pieces))


def example_arrays(index: int | str, example: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return input_ids and labels of one example, int[S], and its weights float32[S] or None.

    Raises PackingError naming its index.
    """
    if isinstance(example, Mapping):  # a mapping of two columns would unpack into their names
        raise PackingError(
            f"example {index} is a {type(example).__name__}: give objects with input_ids and labels, or pairs of the two, "
            'such as (row["input_ids"], row["labels"])'
        )
    try:
        ids, labels = (example.input_ids, example.labels) if hasattr(example, "input_ids") else example
    except (AttributeError, TypeError, ValueError) as error:
        raise PackingError(
            f"example {index} is a {type(example).__name__}: give objects with input_ids and labels, or pairs of the two"
        ) from error
    ids, labels = _integers(index, "input_ids", ids), _integers(index, "labels", labels)
    if ids.size != labels.size:
        raise PackingError(
            f"example {index} has {ids.size} input_ids and {counted(labels.size, 'labels')}: there must be one label a token"
        )
    if labels.dtype.kind == "u":
        _refuse_wrapped(index, ids, labels)
    weights = getattr(example, "weights", None)
    return ids, labels, None if weights is None else _weights(index, weights, ids.size)


def _refuse_wrapped(index: int | str, ids: np.ndarray, labels: np.ndarray) -> None:
    """Raise PackingError where -100 was stored in an unsigned type, as a token id."""
    wrapped = np.iinfo(labels.dtype).max + 1 + IGNORE
    bad = (labels == wrapped) & (ids != wrapped)
    if bad.any():
        raise PackingError(
            f"example {index}: labels[{bad.argmax()}] is {wrapped}, which is {IGNORE} in {labels.dtype}; keep labels in a "
            "signed type, such as int32"
        )


def _weights(index: int | str, values: Any, size: int) -> np.ndarray:
    try:
        array = np.asarray(values, dtype=np.float32)
    except (TypeError, ValueError) as error:
        raise PackingError(f"example {index}: weights must be a flat sequence of numbers: {error}") from error
    if array.shape != (size,):
        raise PackingError(f"example {index} has {size} input_ids and weights {list(array.shape)}: there must be one a token")
    bad = np.flatnonzero(~(np.isfinite(array) & (array >= 0)))
    if bad.size:
        raise PackingError(
            f"example {index}: the weight of token {bad[0]} is {array[bad[0]]}; weights are finite numbers from 0"
        )
    return array


def _integers(index: int | str, name: str, values: Any) -> np.ndarray:
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise PackingError(f"example {index}: {name} must be a flat sequence of integers: {error}") from error
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise PackingError(
            f"example {index}: {name} must be a flat sequence of integers, at least one; got {array.dtype}{list(array.shape)}"
        )
    return array


def concatenated(pieces: list[np.ndarray]) -> Int64Array:
    """Concatenate the pieces as int64."""
    if not pieces:
        return np.zeros(0, dtype=np.int64)
    return np.concatenate(pieces, dtype=np.int64, casting="same_kind")
