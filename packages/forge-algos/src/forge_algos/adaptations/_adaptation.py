"""How much of a model moves: what every adaptation answers, and the one that lets everything move."""

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import torch
from torch import nn


class Ranks(Protocol):
    """The processes that share a model, as far as an adaptation needs to know of them; `forge_dist.Ranks` is one."""

    @property
    def rank(self) -> int:
        """This one's number."""
        ...

    @property
    def world_size(self) -> int:
        """How many there are."""
        ...

    def barrier(self) -> None:
        """Wait for all."""
        ...


class OneRank:
    """One process."""

    rank = 0
    world_size = 1

    def barrier(self) -> None:
        """Nothing to wait for."""


class Adaptation:
    """Everything moves. Others subclass it; `adapt` makes the one that settings name.

    Between a step's last backward pass and the measuring of its gradients `train` calls `before_step`, and `after_step` right after the
    optimizer moved. Both are collective where the model is divided over ranks.
    """

    writes: Literal["model", "adapter"] = "model"
    """What an export of it is: a plain model, or an adapter directory beside its base."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        """What is called and trained: the model itself, or PEFT's around it."""

    @property
    def additions(self) -> Sequence[str]:
        """Names of modules that it added to the model and that no plain model has."""
        return ()

    @property
    def identity(self) -> str:
        """What its state belongs to beside the model and the settings: singular vectors, say. A full state of another is refused."""
        return ""

    def describe(self) -> list[str]:
        """Lines for the log: what trains, by name and count, and what does not."""
        parameters = list(self.model.parameters())
        trained = sum(p.numel() for p in parameters if p.requires_grad)
        total = sum(p.numel() for p in parameters)
        return [f"trains {trained:,} of {total:,} parameters ({100 * trained / max(total, 1):.2f} %)"]

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise OptimizerError where `after_step` could not undo what the optimizer does."""

    def before_step(self) -> None:
        """Take from the gradients what may not move."""

    def after_step(self) -> None:
        """Take from the weights what may not have moved."""

    def plain(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What a plain model holds under `name` (of `model.state_dict()`), given the whole tensor there, on any device; a new one where it
        differs, in the dtype of the tensor.
        """
        del name
        return tensor

    def plain_state(self) -> dict[str, torch.Tensor]:
        """The state of a plain model, by name, where one process holds the model: `model.save_pretrained(folder, state_dict=...)`.

        With writes="adapter" it is the adapter that is saved instead: PEFT's `save_pretrained`.
        """
        own = tuple(f"{name}." for name in self.additions)
        return {name: self.plain(name, tensor) for name, tensor in self.model.state_dict().items() if not name.startswith(own)}


Importance = Callable[[Sequence[str]], dict[str, float]]
"""Names of targets → each one's importance, mean 1; see `osft_importance`."""
