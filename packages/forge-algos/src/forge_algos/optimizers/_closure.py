"""The step of optimizers of our own: the closure, then the move, by one algorithm or more."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from forge_algos.optimizers._divided import rows_here
from forge_algos.optimizers._rounding import rounding_key


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


class Numbered(OneByOne):
    """Optimizer of rows that ranks divide, with random bits by a parameter's number."""

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        defaults: dict[str, Any],
        *,
        name: str,
        seed: int,
        numbers: Mapping[nn.Parameter, int] | None,
    ) -> None:
        """Take groups of parameters, numbered by their place in them unless `numbers` has others.

        Raises:
            OptimizerError: ranks divide other parts than rows, or whole matrices of a stack; `name` is the optimizer's.
        """
        super().__init__(groups, defaults)
        parameters = [p for group in self.param_groups for p in group["params"]]
        for parameter in parameters:
            rows_here(parameter, name)
        self._numbers = {p: number for number, p in enumerate(parameters)} if numbers is None else dict(numbers)
        self._seed = seed

    def _key(self, parameter: nn.Parameter, draw: int) -> int:
        """Return the key of the random bits of a parameter's draw."""
        return rounding_key(self._seed, self._numbers[parameter], draw)


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
