"""Log-probabilities of completions in a packed row: of their tokens, and of each as a whole."""

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import vocabulary
from forge_algos.batches._copies import to_device
from forge_algos.batches._groups import PackedGroups, check_groups, group_inputs, group_tensors
from forge_algos.batches._media import with_media
from forge_algos.batches._packed import refuse_empty
from forge_algos.heads._head import choose_head
from forge_algos.heads._packable import require_packable
from forge_algos.isolation._prompt_sharing import shares_prompts
from forge_algos.losses import completion_logps


class GroupModel:
    """Model that takes rows of groups, after a test whether it may."""

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        require_packable(model, device=device)
        self.model = model
        self.device = device
        # Here and not at the first such row: where a model is divided over ranks, all of them run the test together.
        self._shares = shares_prompts(model, device=device)
        self._vocabulary = vocabulary(model)

    def inputs(self, groups: PackedGroups) -> dict[str, Any]:
        """Build the forward's arguments.
        Raises PackedBatchError where the row is empty or malformed, or shares prompts and the model cannot.
        """
        refuse_empty(groups.input_ids)
        check_groups(groups, self._vocabulary)
        can, why = self._shares
        if groups.kv_rows is not None and not can:
            raise PackedBatchError(f"the row's prompts are shared by their completions: {why}")
        return with_media(self.model, groups, group_inputs(groups, self.device))


class Completions(GroupModel):
    """Causal language model that scores the completions of a row, one forward a row."""

    def __init__(self, model: nn.Module, *, device: torch.device) -> None:
        super().__init__(model, device=device)
        self.head = choose_head(model, device=device)

    def tokens(self, groups: PackedGroups, beside: tuple[NDArray[Any], NDArray[Any]] | None = None) -> torch.Tensor:
        """Compute the log-probabilities float32[M] of the learned tokens, in nats.
        With `beside`, (positions, the tokens that they should predict), those of these tokens follow.
        """
        inputs = self.inputs(groups)
        rows, targets, _ = group_tensors(groups, self.device)
        if beside is not None:
            further = (to_device(array, self.device) for array in beside)
            rows, targets = (torch.cat(both) for both in zip((rows, targets), further, strict=True))
        return self.head.logps(inputs, rows, targets)

    def tokens_and_collision(self, groups: PackedGroups) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the log-probabilities float32[M] of the learned tokens, and log Σ p²[M].
        The sum is over the vocabulary at each of them, and has no gradient.
        """
        rows, targets, _ = group_tensors(groups, self.device)
        return self.head.logps_and_collision(self.inputs(groups), rows, targets)


def sum_by_completion(tokens: torch.Tensor, groups: PackedGroups) -> torch.Tensor:
    """Sum tokens' float32[M] over each completion: float32[B]."""
    return completion_logps(tokens, torch.tensor(np.asarray(groups.lengths)))


def to_float32(array: ArrayLike, device: torch.device) -> torch.Tensor:
    """Copy numbers to `device` as float32[N]."""
    return to_device(array, device, torch.float32)
