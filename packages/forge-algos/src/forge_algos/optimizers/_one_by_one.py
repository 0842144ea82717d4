"""The step of optimizers that move one parameter after another."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class OneByOne(torch.optim.Optimizer):
    """Optimizer that moves each parameter by itself."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        """Move every parameter that has a gradient; return the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _move(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Move `parameter` in place by `gradient`, of its shape."""
