"""A linear layer → the same layer, same name, same weight, whose output is that of W + ΔW, where ΔW comes from a module beside it.

The layer stays the object that it was, so that what divides, finds or saves it by name notices nothing; the module is its child `osft`.
"""

from abc import ABC, abstractmethod
from types import MethodType
from typing import Any

import torch
from torch import nn

from forge_algos.adaptations.osft._linear import Pair, moved_linear

CHILD = "osft"


class Delta(nn.Module, ABC):
    """ΔW of one linear layer; its parameters are what trains, its buffers, which no state holds, the directions."""

    off = False
    """Whether the layer is to answer as it was."""

    @abstractmethod
    def factors(self) -> tuple[torch.Tensor, torch.Tensor, Pair | None]:
        """(L [N, r], R [M, r], what is taken away or None): ΔW = L Rᵀ less the product of that pair; gradients flow."""

    def moved(self) -> torch.Tensor:
        """float32[N, M]: ΔW, outside of any autocast."""
        with torch.no_grad(), torch.autocast(next(self.buffers()).device.type, enabled=False):
            left, right, without = self.factors()
            moved = left @ right.t()
            return moved if without is None else moved.addmm_(without[0], without[1].t(), alpha=-1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """float[..., N]: x float[..., M] through W + ΔW."""
        if next(self.buffers()).device != x.device:
            # Weights that lie in the host's memory come to the device to compute, and constants follow them once.
            self.to(x.device)
        left, right, without = self.factors()
        return moved_linear(x, weight, bias, left, right, without)

    def after_step(self) -> None:
        """Take from the parameters what may not have moved."""

    def before_step(self) -> None:
        """Take from the gradients what may not move."""


def attach(linear: nn.Linear, delta: Delta) -> None:
    """Let `linear` answer with what `delta` adds."""
    layer: Any = linear
    layer.add_module(CHILD, delta)
    layer.forward = MethodType(_forward, linear)


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.osft.off:
        return nn.functional.linear(x, self.weight, self.bias)
    return self.osft(x, self.weight, self.bias)


def constant(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor in float32 where `like` is, dense and of its own storage: a buffer's value."""
    return tensor.detach().to(device=like.device, dtype=torch.float32, copy=True, memory_format=torch.contiguous_format)
