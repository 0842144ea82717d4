"""The step of optimizers of our own: the closure first, then the move."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ClosureOptimizer(torch.optim.Optimizer):
    """Optimizer that computes the closure's loss, then moves the parameters."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # pyrefly: ignore[bad-override]
        """Move every parameter that has a gradient; return the closure's loss, if any."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._move_all()
        return loss

    @abstractmethod
    def _move_all(self) -> None:
        """Move every parameter that has a gradient."""


class OneByOne(ClosureOptimizer):
    """Optimizer that moves each parameter by itself."""

    def _move_all(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)

    @abstractmethod
    def _move(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        """Move `parameter` in place by `gradient`, of its shape."""
