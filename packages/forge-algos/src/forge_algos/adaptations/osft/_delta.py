"""A linear layer that computes with W + ΔW, where ΔW comes from a module beside it.

The layer stays the same object with its name and weight, so that what divides, finds or saves it by name is unaffected; the
module is its child `osft`.
"""

from abc import ABC, abstractmethod
from types import MethodType
from typing import Any

import torch
from torch import nn

from forge_algos.adaptations.osft._linear import Pair, moved_linear

CHILD = "osft"
"""Name of the module beside a target."""
MARK = "forge_osft"
"""Attribute of a model under OSFT: what moves weights that cannot be switched off,
in words; "" where nothing does."""


class Delta(nn.Module, ABC):
    """ΔW of one linear layer: its parameters train; its buffers, the directions, are not saved."""

    off = False
    """Whether the layer computes with W alone."""

    @abstractmethod
    def factors(self) -> tuple[torch.Tensor, torch.Tensor, Pair | None]:
        """Return (L [N, r], R [M, r], a pair or None), with gradients.
        ΔW = L Rᵀ less the product of the pair.
        """

    def moved(self) -> torch.Tensor:
        """Compute ΔW, float32[N, M], outside of any autocast."""
        with torch.no_grad(), torch.autocast(next(self.buffers()).device.type, enabled=False):
            left, right, without = self.factors()
            moved = left @ right.t()
            return moved if without is None else moved.addmm_(without[0], without[1].t(), alpha=-1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x float[..., M] through W + ΔW: float[..., N]."""
        if next(self.buffers()).device != x.device:
            # Weights in the host's memory are moved to the device to compute; the constants follow once.
            self.to(x.device)
        left, right, without = self.factors()
        return moved_linear(x, weight, bias, left, right, without)

    def after_step(self) -> None:
        """Remove from the parameters what may not have moved."""

    def before_step(self) -> None:
        """Remove from the gradients what may not move."""


def attach(linear: nn.Linear, delta: Delta) -> None:
    """Let `linear` compute with the ΔW of `delta`."""
    layer: Any = linear
    layer.add_module(CHILD, delta)
    layer.forward = MethodType(_forward, linear)


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.osft.off:
        return nn.functional.linear(x, self.weight, self.bias)
    return self.osft(x, self.weight, self.bias)


def constant(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy the tensor to float32 on the device of `like`, dense and of its own storage.
    It becomes a buffer.
    """
    return tensor.detach().to(device=like.device, dtype=torch.float32, copy=True, memory_format=torch.contiguous_format)
