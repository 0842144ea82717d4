"""The step of optimizers of our own: the closure, then the move, by one algorithm or more."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
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


class Combined(ClosureOptimizer):
    """Several optimizers as one, with one state; a group's `algorithm` names its own."""

    def __init__(self, parts: Sequence[tuple[str, torch.optim.Optimizer]]) -> None:
        """Take algorithms by name, in the order of their groups."""
        # Every group has all options of its own algorithm; there are no defaults for all.
        groups = [{**group, "algorithm": name} for name, part in parts for group in part.param_groups]
        super().__init__(groups, {"lr": parts[0][1].defaults["lr"]})
        self._parts = parts

    def _move_all(self) -> None:
        for name, part in self._parts:
            # Set at each step, since loading a state replaces both.
            part.param_groups = [group for group in self.param_groups if group["algorithm"] == name]
            part.state = self.state
            part.step()
