"""A layer whose own forward is another function for a while, called as ever: with its hooks, in its place in the model.

What divides a model over ranks gathers a layer's weights in hooks around its call. So the loss is computed inside the head's
call, where its weight is whole, and not beside the model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def swapped_forward(layer: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside the block `layer(x)` runs its hooks around `forward(x)`."""
    layer.forward = forward
    try:
        yield
    finally:
        # What was set on the layer hides its class's method; without it that is seen again.
        del layer.forward


class _Carry(torch.autograd.Function):
    """loss[] → zeros[1, 1, V], through which a backward pass reaches the loss and to which it adds nothing."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        _ctx: Any, _loss: torch.Tensor, like: torch.Tensor, width: int
    ) -> torch.Tensor:
        return like.new_zeros(1, 1, width)

    @staticmethod
    def backward(ctx: Any, *_grad_outputs: Any) -> tuple[None, None, None]:  # noqa: ARG004
        return None, None, None


class _Join(torch.autograd.Function):
    """(loss[], what became of the carrier) → loss[], the same; backward it starts the path that the forward took."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, loss: torch.Tensor, carrier: torch.Tensor
    ) -> torch.Tensor:
        ctx.carrier = carrier.shape, carrier.dtype, carrier.device
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        shape, dtype, device = ctx.carrier
        return grad_outputs[0], torch.zeros(shape, dtype=dtype, device=device)


def carry(loss: torch.Tensor, like: torch.Tensor, width: int) -> torch.Tensor:
    """Stand-in for a head's logits, zeros[1, 1, width] of `like`'s dtype and device, that hang on `loss`."""
    return _Carry.apply(loss, like.detach(), width)


def join(loss: torch.Tensor, carrier: torch.Tensor) -> torch.Tensor:
    """The loss, whose backward pass runs through `carrier` too, so that hooks on the outputs of all modules see it first.

    Sharded modules gather their weights for the backward pass in such hooks. The gradients do not change by a bit: what comes
    back through the carrier is dropped.
    """
    return _Join.apply(loss, carrier)
