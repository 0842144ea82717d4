"""Supervised fine-tuning: a packed row → the summed negative log-likelihood of its learned tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._batch import IGNORE, PackedBatch, check_batch, next_tokens
from forge_algos._errors import AdapterError
from forge_algos._isolation import packed_inputs, require_isolation
from forge_algos._modules import unwrap, vocabulary
from forge_algos.losses import LossTerms
from forge_algos.objectives._head import Head, choose_head


class _Row(NamedTuple):
    """A `PackedBatch`."""

    input_ids: NDArray[Any]
    labels: NDArray[Any]
    position_ids: NDArray[Any]
    cu_seqlens: NDArray[Any]
    max_seqlen: int


@attrs.frozen
class SFT:
    """Each learned token is predicted from the tokens before it in its own document, and only from those.

    The forward gets `use_cache=False`, no mask, positions that start anew in each document, and `cu_seq_lens_q/k` (int32
    [B+1]) with `max_length_q/k`, which variable-length attention reads; sdpa and eager go by the positions.
    """

    def count(self, batch: PackedBatch) -> int:
        """Learned tokens of the row, without a forward; an empty row has none."""
        if not len(batch.input_ids):
            return 0
        check_batch(batch)
        return int((next_tokens(batch) != IGNORE).sum())

    def idle(self) -> PackedBatch:
        """One document of two tokens, the second learned; every vocabulary has the id 0."""
        return _Row(
            input_ids=np.zeros(2, np.int64),
            labels=np.array([IGNORE, 0]),
            position_ids=np.arange(2),
            cu_seqlens=np.array([0, 2]),
            max_seqlen=2,
        )

    def bind(self, model: nn.Module, *, device: torch.device) -> Callable[[PackedBatch], LossTerms]:
        """Choose how this model's head is scored (`forge_algos.objectives.choose_head` says why), then run batches.

        Raises:
            PackedBatchError: the model does not keep the documents of a packed row apart; two made-up ones are tried.
            AdapterError: the model carries a prompt-like adapter, whose virtual tokens belong to no document.
        """
        for name, config in getattr(unwrap(model), "peft_config", {}).items():
            if getattr(config, "is_prompt_learning", False):
                kind = getattr(config, "peft_type", "a prompt")
                raise AdapterError(f"adapter {name!r} is {kind}: its virtual tokens have no place in a packed row; use LoRA")
        require_isolation(model, device=device)
        return _BoundSFT(choose_head(model, device=device), device)


class _BoundSFT:
    def __init__(self, head: Head, device: torch.device) -> None:
        self.head = head
        self._device = device
        self._vocabulary = vocabulary(head.model)

    def __call__(self, batch: PackedBatch) -> LossTerms:
        check_batch(batch, self._vocabulary)
        targets = next_tokens(batch)
        rows = np.flatnonzero(targets != IGNORE)
        inputs = packed_inputs(
            self._to_device(batch.input_ids),
            self._to_device(batch.position_ids),
            self._to_device(batch.cu_seqlens),
            int(batch.max_seqlen),
        )
        return self.head(inputs, self._to_device(rows), self._to_device(targets[rows]))

    def _to_device(self, array: NDArray[Any]) -> torch.Tensor:
        # A copy: the array may be a read-only view of a file.
        return torch.tensor(array, dtype=torch.int64).to(self._device, non_blocking=True)
