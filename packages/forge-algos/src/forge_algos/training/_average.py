"""Exponential moving average of the trained weights, kept beside the optimizer's state."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from forge_algos._errors import OptimizerError
from forge_algos._modules import free_gathered
from forge_algos.optimizers._divided import local, rows_here
from forge_algos.optimizers._rounding import round_stochastically_, rounding_key

_KEY = "average"
"""Entry of the optimizer's state of a parameter; it is saved, divided and restored with it."""
_SEED = 0x57EAD1
"""Of the random bits by which averages are rounded: others than those of an optimizer's steps."""
_AT_ONCE = 1 << 24
"""Most numbers that are held in float32 at a time."""


class WeightAverage:
    """Moving average a ← a + rate · (w - a) of an optimizer's parameters.

    It begins as the weights at the first step and follows each step that moves them, or each `every`-th step. Each parameter's
    average lies in the optimizer's state of it, in the shape and on the ranks of the parameter, so that whoever saves the one
    saves the other. In bfloat16 it is rounded stochastically: a small rate's moves are less than half of its spacing.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, rate: float, *, every: int | None = None) -> None:
        """Take an optimizer before its first step, or with the state of a run that is resumed.

        Args:
            optimizer: holds the weights.
            rate: above 0, at most 1.
            every: moves after the steps whose number is a multiple of it, whether or not these moved the weights.

        Raises:
            OptimizerError: the optimizer keeps no state of its own for each parameter.
        """
        if not isinstance(getattr(optimizer, "state", None), dict):
            raise OptimizerError(
                f"{type(optimizer).__name__} keeps no state for each parameter, beside which an average could be kept"
            )
        self._optimizer, self._rate, self._every = optimizer, rate, every
        self._parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._began: dict[nn.Parameter, torch.Tensor] = {}

    def before_step(self) -> None:
        """Keep the weights that the average begins with."""
        for p in self._parameters:
            if p not in self._began and _KEY not in self._optimizer.state.get(p, {}):
                self._began[p] = p.detach().clone()

    def after_step(self, step: int, *, moved: bool) -> None:
        """Move the average towards the weights, where it follows the step of this number."""
        due = moved if self._every is None else step % self._every == 0
        for number, p in enumerate(self._parameters):
            # An optimizer makes a parameter's state at its first gradient, and only where there is none yet.
            if state := self._optimizer.state.get(p):
                if _KEY not in state:
                    state[_KEY] = self._began.pop(p)
                if due and state[_KEY].dtype == torch.bfloat16:
                    self._move_rounded(state[_KEY], p, rounding_key(_SEED, number, step))
                elif due:
                    state[_KEY].lerp_(p.detach().to(state[_KEY].dtype), self._rate)

    def _move_rounded(self, average: torch.Tensor, parameter: nn.Parameter, key: int) -> None:
        """Move an average in bfloat16, whatever its ranks hold of it."""
        first, count = rows_here(parameter, type(self._optimizer).__name__)
        if not count:
            return  # of a matrix with fewer rows than ranks
        into, weight = (local(each).view(count, -1) for each in (average, parameter))
        at_once = max(1, _AT_ONCE // max(1, into.shape[1]))
        for begin in range(0, count, at_once):
            rows = slice(begin, begin + at_once)
            exact = into[rows].float().lerp_(weight[rows].float(), self._rate).contiguous()
            round_stochastically_(into[rows], exact, first_row=first + begin, key=key)

    @contextmanager
    def exchanged(self, model: nn.Module) -> Iterator[None]:
        """Exchange the weights for their averages in the block; then they are back to the bit."""
        free_gathered(model)
        self._exchange()
        try:
            yield
        finally:
            free_gathered(model)
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for p in self._parameters:
            average = self._optimizer.state.get(p, {}).get(_KEY)
            if average is not None:
                before = p.detach().clone()
                p.copy_(average)
                average.copy_(before)
        # An autocast that is open would go on with its casts of the former weights.
        torch.clear_autocast_cache()
