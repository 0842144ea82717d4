"""Completions of one or more prompts in a packed row → log-probabilities of their tokens, and of each as a whole."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import vocabulary
from forge_algos.batches._groups import PackedGroups, check_groups, group_inputs, group_tensors
from forge_algos.heads._head import choose_head
from forge_algos.heads._packable import require_packable
from forge_algos.isolation._prompt_sharing import shares_prompts
from forge_algos.losses import completion_logps


class Rows:
    """A model that rows of groups are given to, after a look at whether it may have them."""

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        require_packable(model, device=device)
        self.model = model
        self.device = device
        # Now and not at the first such row: where a model is divided over ranks, all of them try it together.
        self._shares = shares_prompts(model, device=device)
        self._vocabulary = vocabulary(model)

    def inputs(self, groups: PackedGroups) -> dict[str, Any]:
        """The forward's arguments; PackedBatchError where the row is none, or shares prompts and the model cannot."""
        check_groups(groups, self._vocabulary)
        can, why = self._shares
        if groups.kv_rows is not None and not can:
            raise PackedBatchError(f"the row's prompts are shared by their completions: {why}")
        return group_inputs(groups, self.device)


class Completions(Rows):
    """A causal language model that is asked, one forward a row, how likely the row's completions are."""

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        super().__init__(model, device=device)
        self.head = choose_head(model, device=device)

    def tokens(self, groups: PackedGroups, beside: tuple[NDArray[Any], NDArray[Any]] | None = None) -> torch.Tensor:
        """float32[M], in nats, of the learned tokens; then of `beside`: (positions, the tokens that they should predict)."""
        inputs = self.inputs(groups)
        rows, targets, _ = group_tensors(groups, self.device)
        if beside is not None:
            further = (torch.tensor(array, dtype=torch.int64).to(self.device, non_blocking=True) for array in beside)
            rows, targets = (torch.cat(both) for both in zip((rows, targets), further, strict=True))
        return self.head.logps(inputs, rows, targets)


def whole(tokens: torch.Tensor, groups: PackedGroups) -> torch.Tensor:
    """float32[B]: the sum over each completion, from its tokens' float32[M]."""
    return completion_logps(tokens, torch.tensor(np.asarray(groups.lengths)))


def tails(tokens: torch.Tensor, groups: PackedGroups) -> torch.Tensor:
    """float32[B]: the sum over what lies beyond the shortest completion of the same group; 0 where nothing does."""
    lengths, sizes = np.asarray(groups.lengths), np.asarray(groups.group_sizes)
    shortest = np.minimum.reduceat(lengths, np.cumsum(sizes) - sizes)
    return completion_logps(tokens, torch.tensor(lengths), skip=torch.tensor(np.repeat(shortest, sizes)))


def numbers(array: ArrayLike, device: torch.device) -> torch.Tensor:
    """float32[N] on `device`; a copy, since the array may be a read-only view of a file."""
    return torch.tensor(np.asarray(array), dtype=torch.float32).to(device, non_blocking=True)
