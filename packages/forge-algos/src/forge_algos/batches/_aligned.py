"""Batch of distillation across tokenizers: the same samples as two models read them."""

from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from forge_algos._errors import PackedBatchError
from forge_algos.batches._packed import IGNORE, PackedBatch, check_integers, require


class AlignedBatch(Protocol):
    """Two packed rows of the same text in two tokenizers, and G spans that both cut alike."""

    @property
    def row(self) -> PackedBatch:
        """Row of the student: its labels say nothing here, its `weights` count."""
        ...

    @property
    def teacher(self) -> PackedBatch:
        """Row of the teacher, which may have other documents and other text between spans."""
        ...

    @property
    def spans(self) -> NDArray[Any]:
        """int[G, 4]: tokens [a, b) of the row and [c, d) of the teacher's, of the same text.

        Each has at least one token, and a token before it in its document.
        """
        ...


class SpanPositions(NamedTuple):
    """Positions of a row at which the tokens of G spans are predicted."""

    last: NDArray[np.int64]
    """int64[G]: where the last token of each span is predicted."""
    before: NDArray[np.int64]
    """int64[E]: where the tokens before the last are, span after span."""
    targets: NDArray[np.int64]
    """int64[E]: those tokens."""
    of: NDArray[np.int64]
    """int64[E]: the span that each belongs to."""


def span_positions(ids: NDArray[Any], spans: NDArray[Any]) -> SpanPositions:
    """Find where the tokens of spans int[G, 2] are predicted in a row of ids int[T].

    >>> found = span_positions(np.array([7, 5, 6, 8]), np.array([[1, 3], [3, 4]]))
    >>> found.last.tolist(), found.before.tolist(), found.targets.tolist(), found.of.tolist()
    ([1, 2], [0], [5], [0])
    """
    starts, stops = np.asarray(spans, np.int64).reshape(-1, 2).T
    further = stops - starts - 1
    of = np.repeat(np.arange(len(starts)), further)
    places = np.arange(len(of)) - np.repeat(np.cumsum(further) - further, further) + starts[of]
    return SpanPositions(stops - 2, places - 1, np.asarray(ids, np.int64)[places], of)


def check_aligned(batch: AlignedBatch) -> None:
    """Raise PackedBatchError unless the spans are within documents of both rows.

    The rows themselves are checked as they are loaded.
    """
    for name in ("row", "teacher", "spans"):
        require(batch, name, "a row with a teacher's row and spans of both")
    spans = np.asarray(batch.spans)
    check_integers(spans=spans)
    if spans.ndim != 2 or spans.shape[1] != 4:
        raise PackedBatchError(f"spans must be int[G, 4], two tokens of each row, got {list(spans.shape)}")
    for of, row, part in (("the student's", batch.row, spans[:, :2]), ("the teacher's", batch.teacher, spans[:, 2:])):
        starts, stops = part.T
        cu = np.asarray(row.cu_seqlens)
        whole = (starts >= 1) & (stops > starts) & (stops <= len(row.input_ids))
        one = np.searchsorted(cu, starts - 1, side="right") == np.searchsorted(cu, stops - 1, side="right")
        if not (whole & one).all():
            wrong = part[~(whole & one)][0].tolist()
            raise PackedBatchError(
                f"a span has the tokens {wrong} of {of} row of {len(row.input_ids)}: it must have some, all of one document, "
                "and a token before them"
            )


def span_weights(batch: AlignedBatch) -> NDArray[np.float32] | None:
    """Return the mean weight of each span's own tokens, float32[G]; None without weights."""
    weights = getattr(batch.row, "weights", None)
    if weights is None:
        return None
    ends = np.append(0.0, np.cumsum(np.asarray(weights, np.float64)))
    starts, stops = np.asarray(batch.spans, np.int64)[:, :2].T
    return ((ends[stops] - ends[starts]) / (stops - starts)).astype(np.float32)


class _Row(NamedTuple):
    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int64]
    max_seqlen: int


class _Aligned(NamedTuple):
    row: _Row
    teacher: _Row
    spans: NDArray[np.int64]


def idle_aligned() -> AlignedBatch:
    """Make one document of two tokens on both sides, for a rank without work."""
    row = _Row(np.zeros(2, np.int64), np.array([IGNORE, 0]), np.arange(2), np.array([0, 2]), 2)
    return _Aligned(row, row, np.array([[1, 2, 1, 2]]))
