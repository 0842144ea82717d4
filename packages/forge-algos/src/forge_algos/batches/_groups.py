"""Packed rows of completions: their protocol, checks, and the arguments of a forward.

Rows come from a packer, such as forge_packing; packages agree by shape, so this file states the shape.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from forge_algos._errors import PackedBatchError
from forge_algos.batches._copies import to_device
from forge_algos.batches._packed import check_integers, packed_inputs, require


class PackedGroups(Protocol):
    """Flat padding-free row of T tokens: B completions in G groups, M learned tokens.
    Arrays are numpy's, of any integer dtype.

    It may have `weights` too: float[M] from 0, by how much the loss term of each learned token counts, or None. Objectives on
    learned tokens read them; others have no use for them.

    And it may have `media_inputs`: a function that returns what a processor makes of each completion's images, its prompt's
    among them, as a `PackedBatch` has it for documents. Such completions share no prompts.
    """

    @property
    def input_ids(self) -> NDArray[Any]:
        """int[T]: one segment after another; tokens that attend together are a segment."""
        ...

    @property
    def position_ids(self) -> NDArray[Any]:
        """int[T]: 0, 1, 2, ... in each completion's whole sequence, its prompt included."""
        ...

    @property
    def rows(self) -> NDArray[Any]:
        """int[M]: the position whose logits predict each learned token, completion after completion."""
        ...

    @property
    def targets(self) -> NDArray[Any]:
        """int[M]: the learned tokens."""
        ...

    @property
    def lengths(self) -> NDArray[Any]:
        """int[B]: learned tokens of each completion."""
        ...

    @property
    def ends(self) -> NDArray[Any]:
        """int[B]: the position of each completion's last token."""
        ...

    @property
    def group_sizes(self) -> NDArray[Any]:
        """int[G]: completions of each group."""
        ...

    @property
    def cu_seqlens(self) -> NDArray[Any]:
        """int[n+1]: where segments begin, and T at the end."""
        ...

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment."""
        ...

    @property
    def kv_rows(self) -> NDArray[Any] | None:
        """int[Tk]: positions whose keys each segment sees, its own last; None: only its own."""
        ...

    @property
    def cu_seqlens_k(self) -> NDArray[Any] | None:
        """int[n+1]: where segments begin in `kv_rows`, and Tk at the end; None where `kv_rows` is."""
        ...

    @property
    def max_seqlen_k(self) -> int | None:
        """Number of keys of the segment with the most; None where `kv_rows` is."""
        ...


class _Groups(NamedTuple):
    """A `PackedGroups`."""

    input_ids: NDArray[Any]
    position_ids: NDArray[Any]
    rows: NDArray[Any]
    targets: NDArray[Any]
    lengths: NDArray[Any]
    ends: NDArray[Any]
    group_sizes: NDArray[Any]
    cu_seqlens: NDArray[Any]
    max_seqlen: int
    kv_rows: NDArray[Any] | None = None
    cu_seqlens_k: NDArray[Any] | None = None
    max_seqlen_k: int | None = None


def group_inputs(batch: PackedGroups, device: torch.device) -> dict[str, Any]:
    """Build the forward's arguments for the row, with `kv_rows` where prompts are shared."""
    inputs = packed_inputs(
        to_device(batch.input_ids, device),
        to_device(batch.position_ids, device),
        to_device(batch.cu_seqlens, device),
        int(batch.max_seqlen),
    )
    if batch.kv_rows is not None:
        assert batch.cu_seqlens_k is not None and batch.max_seqlen_k is not None  # noqa: PT018 - check_groups tests it
        inputs["kv_rows"] = to_device(batch.kv_rows, device)
        inputs["cu_seq_lens_k"] = to_device(batch.cu_seqlens_k, device, torch.int32)
        inputs["max_length_k"] = int(batch.max_seqlen_k)
    return inputs


def group_tensors(batch: PackedGroups, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return rows int64[M], targets int64[M] and lengths int64[B] of a row as tensors.
    The first two are on the device, lengths on the CPU, where they are read as sizes of splits.
    """
    lengths = torch.tensor(np.asarray(batch.lengths), dtype=torch.int64)
    return to_device(batch.rows, device), to_device(batch.targets, device), lengths


def idle_groups(sizes: Sequence[int] = (2,)) -> PackedGroups:
    """Make a row for a rank without work, with groups of these sizes.
    Each completion is a token of prompt and a learned token.
    """
    completions = sum(sizes)
    starts = np.arange(completions + 1) * 2
    return _Groups(
        input_ids=np.zeros(2 * completions, np.int64),
        position_ids=np.tile(np.arange(2), completions),
        rows=starts[:-1],
        targets=np.zeros(completions, np.int64),
        lengths=np.ones(completions, np.int64),
        ends=starts[:-1] + 1,
        group_sizes=np.array(sizes, np.int64),
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=2,
    )


def check_groups(batch: PackedGroups, vocabulary: int | None = None) -> None:
    """Raise PackedBatchError if the arrays are no row of groups with ids below `vocabulary`.

    An empty row passes: a rank without work has one.
    """
    require(batch, "group_sizes", "a packed row of groups")
    ids, positions = np.asarray(batch.input_ids), np.asarray(batch.position_ids)
    if ids.ndim != 1 or ids.shape != positions.shape:
        raise PackedBatchError(
            f"a row of groups needs input_ids and position_ids of one shape [T], got {list(ids.shape)} and "
            f"{list(positions.shape)}"
        )
    named = ("rows", "targets", "lengths", "ends", "group_sizes", "cu_seqlens")
    check_integers(input_ids=ids, position_ids=positions, **{name: np.asarray(getattr(batch, name)) for name in named})
    queries = _segments("cu_seqlens", batch.cu_seqlens, "the row's", len(ids), batch.max_seqlen)
    _check_keys(batch, queries, positions)
    _check_completions(batch, len(ids))
    for name, values in (("input_ids", ids), ("targets", np.asarray(batch.targets))):
        if vocabulary is not None and values.size and not 0 <= values.min() <= values.max() < vocabulary:
            raise PackedBatchError(
                f"{name} holds the token id {values[(values < 0) | (values >= vocabulary)][0]}, but the model's vocabulary "
                f"ends at {vocabulary - 1}: the data was tokenised for another model"
            )


def _segments(name: str, ends: NDArray[Any] | None, whose: str, tokens: int, longest: int | None) -> NDArray[Any]:
    """Return the segments' lengths int[n], or raise PackedBatchError if they are malformed."""
    cu = np.asarray(ends)
    lengths = np.diff(cu) if cu.ndim == 1 else np.zeros(1)
    if cu.ndim != 1 or not cu.size or cu[0] != 0 or cu[-1] != tokens or (lengths < 1).any():
        shown = np.array2string(cu, threshold=8, edgeitems=3, separator=", ")
        raise PackedBatchError(f"{name} must rise from 0 to {whose} {tokens} tokens, got {shown}")
    if longest is None or longest < lengths.max(initial=0):
        raise PackedBatchError(f"the longest segment of {name} has {lengths.max()} tokens, but the row says {longest}")
    return lengths


def _check_keys(batch: PackedGroups, queries: NDArray[Any], positions: NDArray[Any]) -> None:
    """Check that each segment sees positions 0, 1, 2, ..., its prompt's first and its own last."""
    cu, rows, keys = np.asarray(batch.cu_seqlens), np.arange(len(positions)), queries
    if batch.kv_rows is None:
        if batch.cu_seqlens_k is not None or batch.max_seqlen_k is not None:
            raise PackedBatchError("the row has cu_seqlens_k or max_seqlen_k but no kv_rows: they come together, or not at all")
    else:
        rows = np.asarray(batch.kv_rows)
        keys = _segments("cu_seqlens_k", batch.cu_seqlens_k, "kv_rows'", rows.size, batch.max_seqlen_k)
        if rows.ndim != 1 or keys.shape != queries.shape or (keys < queries).any():
            raise PackedBatchError("kv_rows must hold, for each segment of cu_seqlens, its prompt's positions and then its own")
        place = np.arange(rows.size) - np.repeat(np.cumsum(keys) - queries, keys)  # from the segment's first own key on
        starts = np.repeat(cu[:-1], keys)
        own = place >= 0
        if (rows < 0).any() or (rows[own] != (starts + place)[own]).any() or (rows[~own] >= starts[~own]).any():
            raise PackedBatchError(
                "kv_rows must end, for each segment, in the segment's own positions, and name earlier ones before them"
            )
    expected = np.arange(rows.size) - np.repeat(np.cumsum(keys) - keys, keys)
    if (positions[rows] != expected).any():
        raise PackedBatchError("position_ids must count 0, 1, 2, ... in all that a segment sees, its prompt first")


def _check_completions(batch: PackedGroups, tokens: int) -> None:
    rows, targets, ends = (np.asarray(values) for values in (batch.rows, batch.targets, batch.ends))
    lengths, sizes = np.asarray(batch.lengths), np.asarray(batch.group_sizes)
    if rows.ndim != 1 or rows.shape != targets.shape or lengths.sum() != rows.size or (lengths < 0).any():
        raise PackedBatchError(
            f"the row has {rows.size} rows and {targets.size} targets, but its completions have {lengths.sum()} learned tokens"
        )
    weights = getattr(batch, "weights", None)
    if weights is not None and (
        np.shape(weights) != targets.shape or not (np.isfinite(np.asarray(weights)) & (np.asarray(weights) >= 0)).all()
    ):
        raise PackedBatchError(f"weights must be finite numbers from 0, one for each of the {targets.size} targets")
    if ends.shape != lengths.shape or sizes.sum() != lengths.size or (sizes < 1).any():
        raise PackedBatchError(
            f"the row has {lengths.size} lengths and {ends.size} ends, but its groups have {sizes.sum()} completions"
        )
    for name, values in (("rows", rows), ("ends", ends)):
        if values.size and not 0 <= values.min() <= values.max() < tokens:
            raise PackedBatchError(f"{name} must lie in the row's {tokens} tokens, got {values.min()} to {values.max()}")
