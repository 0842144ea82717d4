"""Packed rows with labels: what `train` asks of an objective on learned tokens, and what a model is fed of a row."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._modules import vocabulary
from forge_algos.batches._packed import IGNORE, PackedBatch, check_batch, next_tokens, sample_count, token_count
from forge_algos.isolation._isolation import packed_inputs


class _Row(NamedTuple):
    """A `PackedBatch`."""

    input_ids: NDArray[Any]
    labels: NDArray[Any]
    position_ids: NDArray[Any]
    cu_seqlens: NDArray[Any]
    max_seqlen: int


class LearnedTokens:
    """What an objective on the learned tokens of packed rows counts, whatever its loss."""

    @property
    def unit(self) -> str:
        """What `count` counts."""
        return "tokens"

    def count(self, batch: PackedBatch) -> int:
        """Learned tokens of the row, without a forward; an empty row has none."""
        if not len(batch.input_ids):
            return 0
        check_batch(batch)
        return int((next_tokens(batch) != IGNORE).sum())

    def samples(self, batch: PackedBatch) -> int:
        """Documents of the row."""
        return sample_count(batch)

    def tokens(self, batch: PackedBatch) -> int:
        """All tokens of the row, learned or not."""
        return token_count(batch)

    def idle(self) -> PackedBatch:
        """One document of two tokens, the second learned; every vocabulary has the id 0."""
        return _Row(
            input_ids=np.zeros(2, np.int64),
            labels=np.array([IGNORE, 0]),
            position_ids=np.arange(2),
            cu_seqlens=np.array([0, 2]),
            max_seqlen=2,
        )


class LearnedRow(NamedTuple):
    """A row on the device: the forward's arguments, the positions int64[M] whose logits are scored, their targets int64[M]."""

    inputs: dict[str, Any]
    rows: torch.Tensor
    targets: torch.Tensor


class RowLoader:
    """Rows → the device, once they have been looked at: ids that the model does not have are an error with that id."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._vocabulary = vocabulary(model)

    def __call__(self, batch: PackedBatch) -> LearnedRow:
        """The row's arguments.

        Raises:
            PackedBatchError: the arrays are no row, or hold an id that the model does not have.
        """
        check_batch(batch, self._vocabulary)
        targets = next_tokens(batch)
        rows = np.flatnonzero(targets != IGNORE)
        inputs = packed_inputs(
            self._to_device(batch.input_ids),
            self._to_device(batch.position_ids),
            self._to_device(batch.cu_seqlens),
            int(batch.max_seqlen),
        )
        return LearnedRow(inputs, self._to_device(rows), self._to_device(targets[rows]))

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        # A copy: the array may be a read-only view of a file.
        return torch.tensor(array, dtype=torch.int64).to(self._device, non_blocking=True)
