"""Linear layers and experts that compute with W + ΔW, where ΔW comes from a module beside.

They stay the same objects with their names and weights, so that what divides, finds or saves them by name is unaffected; the
module is their child `osft`, of experts one for each of their stacks.
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
    """ΔW of a layer or a stack: its parameters train; its buffers, directions, are not saved."""

    off = False
    """Whether the layer computes with W alone."""
    transposed = False
    """Whether the layer multiplies by W itself, as transformers' Conv1D does, and not by Wᵀ."""

    @abstractmethod
    def factors(self) -> tuple[torch.Tensor, torch.Tensor, Pair | None]:
        """Return (L [..., N, r], R [..., M, r], a pair or None), with gradients.
        ΔW = L Rᵀ less the product of the pair.
        """

    def moved(self) -> torch.Tensor:
        """Compute ΔW, float32[..., N, M], outside of any autocast."""
        with torch.no_grad(), torch.autocast(next(self.buffers()).device.type, enabled=False):
            left, right, without = self.factors()
            moved = left @ right.mT
            return moved if without is None else addmm_(moved, without[0], without[1].mT, alpha=-1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute x float[..., M] through W + ΔW: float[..., N]; where transposed, from N to M."""
        self._follow(x.device)
        left, right, without = self.factors()
        if self.transposed:
            weight, left, right, without = weight.t(), right, left, without and (without[1], without[0])
        return moved_linear(x, weight, bias, left, right, without)

    def added(self, weight: torch.Tensor) -> torch.Tensor:
        """Compute W + ΔW of a stack [E, N, M], in its dtype, with gradients for ΔW."""
        self._follow(weight.device)
        with torch.autocast(weight.device.type, enabled=False):
            left, right, without = self.factors()
            whole = addmm(weight, left.to(weight.dtype), right.mT.to(weight.dtype))
            if without is None:
                return whole
            return addmm(whole, without[0].to(weight.dtype), without[1].mT.to(weight.dtype), alpha=-1)

    def _follow(self, device: torch.device) -> None:
        if next(self.buffers()).device != device:
            # Weights in the host's memory are moved to the device to compute; the constants follow once.
            self.to(device)

    def after_step(self) -> None:
        """Remove from the parameters what may not have moved."""

    def before_step(self) -> None:
        """Remove from the gradients what may not move."""


def attach(linear: nn.Module, delta: Delta) -> None:
    """Let `linear` compute with the ΔW of `delta`."""
    delta.transposed = is_transposed(linear)
    layer: Any = linear
    layer.add_module(CHILD, delta)
    layer.forward = MethodType(_forward, linear)


def is_transposed(module: object) -> bool:
    """Return whether a linear layer is transformers' Conv1D, whose weight is [inputs, outputs]."""
    # Deferred: training without an adapter needs no transformers.
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, Conv1D)


def attach_to_stack(experts: nn.Module, key: str, delta: nn.Module) -> None:
    """Let the module `experts` compute with the ΔW of `delta` for its stack `key`."""
    module: Any = experts
    if not hasattr(module, CHILD):
        module.add_module(CHILD, nn.ModuleDict())
        module.forward = MethodType(_experts_forward, experts)
    module.osft[key] = delta


def _experts_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    deltas = {key: delta for key, delta in self.osft.items() if isinstance(delta, Delta) and not delta.off}
    added = {key: delta.added(getattr(self, key)) for key, delta in deltas.items()}
    # An attribute of the instance hides the parameter of that name, which stays where it is registered.
    vars(self).update(added)
    try:
        return type(self).forward(self, *args, **kwargs)
    finally:
        for key in added:
            del vars(self)[key]


def addmm(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    """Compute matrix + alpha left @ right, of matrices [N, M] or of stacks [E, N, M]."""
    return (torch.addmm if matrix.ndim == 2 else torch.baddbmm)(matrix, left, right, alpha=alpha)


def addmm_(matrix: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    """Add alpha left @ right to a matrix, or to the matrices of a stack, in place."""
    return (torch.Tensor.addmm_ if matrix.ndim == 2 else torch.Tensor.baddbmm_)(matrix, left, right, alpha=alpha)


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.osft.off:
        return type(self).forward(self, x)
    return self.osft(x, self.weight, self.bias)


def constant(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Copy the tensor to float32 on the device of `like`, dense and of its own storage.
    It becomes a buffer.
    """
    return tensor.detach().to(device=like.device, dtype=torch.float32, copy=True, memory_format=torch.contiguous_format)
