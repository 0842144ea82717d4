"""Strategies in plain torch, whose models hold tensors and DTensors; that of one process."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from forge_dist._errors import StrategyError
from forge_dist._settings import LaunchSettings, StrategySettings
from forge_dist.environment._topology import topology
from forge_dist.ranks._ranks import Ranks
from forge_dist.strategies._gather import whole_tensors
from forge_dist.strategies._grad_norm import grad_norm, scale_grads
from forge_dist.strategies._state import load_training_state, training_state
from forge_dist.strategies._strategy import MakeOptimizer, StoredState, Strategy, Wanted


class TorchStrategy(Strategy):
    """Base of strategies in plain torch: all but `wrap_model` and `micro_batch`."""

    def wrap(self, model: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, torch.optim.Optimizer]:
        self.checkpoint_activations(model)
        wrapped = self.wrap_model(model)
        return wrapped, make_optimizer(wrapped)

    def wrap_model(self, model: nn.Module) -> nn.Module:
        """Return the module that forwards go through; here the model itself."""
        return model

    def backward(self, loss: torch.Tensor) -> None:
        # What context ranks exchange sums the gradients of them all, and each of them has the row's whole loss.
        (loss / self.settings.cp_size if self.settings.cp_size > 1 else loss).backward()

    def grad_norm(self, parameters: Iterable[nn.Parameter]) -> torch.Tensor:
        return grad_norm(parameters, self.device)

    def scale_grads(self, parameters: Iterable[nn.Parameter], factor: float) -> None:
        scale_grads(parameters, factor)

    def state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        return training_state(model, optimizer)

    def load_state(self, model: nn.Module, optimizer: torch.optim.Optimizer, checkpoint: StoredState) -> None:
        load_training_state(model, optimizer, checkpoint)

    def whole(self, model: nn.Module, names: Wanted | None = None) -> Iterator[tuple[str, torch.Tensor | None]]:
        return whole_tensors(model, self.device, names, self.ranks)


class Single(TorchStrategy):
    """The strategy of one process, also under the name of one that divides nothing there."""

    def __init__(
        self, settings: StrategySettings, ranks: Ranks, *, device: torch.device, name: str, reason: str, adapter: bool
    ) -> None:
        super().__init__(settings, ranks, device=device, name=name, reason=reason, adapter=adapter)
        if ranks.world_size > 1:
            raise StrategyError(
                f"strategy=single is for one process, and there are {ranks.world_size} ranks: use ddp, fsdp2 or auto"
            )

    def micro_batch(self, last: bool) -> AbstractContextManager[None]:  # noqa: ARG002  the protocol's
        return nullcontext()


def one_process(device: torch.device) -> Single:
    """Make the strategy of this process alone, for a model that no strategy loaded."""
    ranks = Ranks(topology(LaunchSettings(), environ={}))
    settings = StrategySettings(strategy="single")
    return Single(settings, ranks, device=device, name="single", reason="one process", adapter=False)
