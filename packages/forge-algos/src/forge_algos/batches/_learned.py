"""Packed row of documents or groups → the forward's arguments, and the learned tokens."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._modules import vocabulary
from forge_algos.batches._copies import to_device
from forge_algos.batches._groups import PackedGroups, check_groups, group_inputs, group_tensors
from forge_algos.batches._media import with_media
from forge_algos.batches._packed import (
    IGNORE,
    PackedBatch,
    check_batch,
    next_tokens,
    packed_inputs,
    refuse_empty,
    require,
    token_weights,
)

AnyRow = PackedBatch | PackedGroups
"""Documents with labels, or groups of completions with the tokens that they learn."""


class LearnedRow(NamedTuple):
    """A row on the device: the forward's arguments and what is learned."""

    inputs: dict[str, Any]
    rows: torch.Tensor
    targets: torch.Tensor
    weights: torch.Tensor | None
    """float32[M], by how much each target's term counts; None where each counts 1."""
    count: float
    """Sum of the weights, M without any."""

    boundaries: torch.Tensor
    """int32[B+1], where documents begin, and T."""


def _groups_of(batch: Any) -> PackedGroups | None:
    """Return a row of groups; None for one of documents."""
    return batch if hasattr(batch, "group_sizes") else None


def loss_count(batch: AnyRow) -> float:
    """Add up the weights of a row's learned tokens, or count them; no forward is made.

    A row of documents without weights in which something is learned is checked by `RowLoader` before its forward, not here too.

    Raises:
        PackedBatchError: the arrays are no row.
    """
    require(batch, "input_ids", "a packed row")
    if not len(batch.input_ids):
        return 0
    if (groups := _groups_of(batch)) is not None:
        check_groups(groups)
        return _sum(len(groups.targets), _weights_of(groups))
    documents: Any = batch
    if getattr(documents, "weights", None) is None:
        require(documents, "labels", "a packed row")
        try:
            count = int(np.count_nonzero(next_tokens(documents) != IGNORE))
        except (IndexError, TypeError, ValueError):  # the check below names the array
            count = 0
        if count:
            return count
    check_batch(documents)
    learned = np.flatnonzero(next_tokens(documents) != IGNORE)
    return _sum(len(learned), token_weights(documents, learned))


def _weights_of(batch: PackedGroups) -> NDArray[np.float32] | None:
    weights = getattr(batch, "weights", None)
    return None if weights is None else np.asarray(weights, dtype=np.float32)


def _sum(count: int, weights: NDArray[np.float32] | None) -> float:
    return count if weights is None else float(weights.sum(dtype=np.float64))


def sample_count(batch: AnyRow) -> int:
    """Count the documents of a row, or its groups."""
    groups = _groups_of(batch)
    return max(0, len(batch.cu_seqlens) - 1) if groups is None else len(groups.group_sizes)


def token_count(batch: AnyRow) -> int:
    """Count the tokens of a row, learned or not.

    A prefix that several groups share counts for each of them; what the completions of one group share counts once.
    """
    groups = _groups_of(batch)
    if groups is None or groups.kv_rows is None or groups.cu_seqlens_k is None:
        return len(batch.input_ids)
    if len(groups.group_sizes) == len(groups.lengths):
        return len(groups.kv_rows)
    of_completion = np.repeat(np.arange(len(groups.group_sizes)), np.asarray(groups.group_sizes))
    of_key = np.repeat(of_completion, np.diff(np.asarray(groups.cu_seqlens_k)))
    return len(np.unique(of_key * len(batch.input_ids) + np.asarray(groups.kv_rows)))


class RowLoader:
    """Moves packed rows to the device, after checking their arrays and token ids."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._vocabulary = vocabulary(model)

    def __call__(self, batch: AnyRow) -> LearnedRow:
        """Return the row's arguments and targets on the device.

        Raises:
            PackedBatchError: the arrays are no row, or hold an id that the model does not have.
        """
        if (groups := _groups_of(batch)) is not None:
            refuse_empty(groups.input_ids)
            check_groups(groups, self._vocabulary)
            rows, targets, _ = group_tensors(groups, self._device)
            inputs = group_inputs(groups, self._device)
            bounds = inputs["cu_seq_lens_q"]
            inputs = with_media(self._model, groups, inputs)
            return self._learned(inputs, rows, targets, _weights_of(groups), bounds)
        documents: Any = batch
        check_batch(documents, self._vocabulary)
        next_T = next_tokens(documents)
        learned = np.flatnonzero(next_T != IGNORE)
        inputs = packed_inputs(
            to_device(documents.input_ids, self._device),
            to_device(documents.position_ids, self._device),
            to_device(documents.cu_seqlens, self._device),
            int(documents.max_seqlen),
        )
        bounds = inputs["cu_seq_lens_q"]
        inputs = with_media(self._model, documents, inputs)
        rows, targets = to_device(learned, self._device), to_device(next_T[learned], self._device)
        return self._learned(inputs, rows, targets, token_weights(documents, learned), bounds)

    def _learned(
        self,
        inputs: dict[str, Any],
        rows: torch.Tensor,
        targets: torch.Tensor,
        weights: NDArray[np.float32] | None,
        boundaries: torch.Tensor,
    ) -> LearnedRow:
        on_device = None if weights is None else to_device(weights, self._device, torch.float32)
        return LearnedRow(inputs, rows, targets, on_device, _sum(len(rows), weights), boundaries)
