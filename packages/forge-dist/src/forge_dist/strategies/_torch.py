"""What single, ddp, fsdp2 and hsdp have in common: their models hold plain tensors and DTensors, and torch's optimizers move them."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import nn

from forge_dist._settings import StrategySettings
from forge_dist.strategies._gather import whole_tensors
from forge_dist.strategies._grad_norm import grad_norm, scale_grads
from forge_dist.strategies._state import load_training_state, training_state
from forge_dist.strategies._strategy import MakeOptimizer, StoredState, Strategy
from forge_dist.strategies._wrappers import checkpoint_activations

if TYPE_CHECKING:
    from forge_dist.ranks._ranks import Ranks


class Divided(Strategy):
    """A strategy without loading and without communication of gradients."""

    def __init__(self, settings: StrategySettings, ranks: "Ranks", *, device: torch.device, name: str, reason: str) -> None:
        self.settings = settings
        self.ranks = ranks
        self.device = device
        self.name = name
        self.reason = reason

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        if self.settings.activation_checkpointing:
            checkpoint_activations(model)
        wrapped = self._wrap(model)
        return wrapped, make_optimizer(wrapped)

    def _wrap(self, model: nn.Module) -> nn.Module:
        return model

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        return grad_norm(parameters, self.device)

    def scale_grads(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        scale_grads(parameters, factor)

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        return training_state(model, optimizer)

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: StoredState) -> None:
        load_training_state(model, optimizer, checkpoint)

    def whole(self, model: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
        return whole_tensors(model, self.device, is_first=self.ranks.is_first)
