"""A sum over rows whose gradients are computed in the forward pass and kept for backward.

A chunk's gradient needs nothing but its own logits where the loss is a plain sum, so it is computed while they are there; the
backward pass only multiplies by the upstream gradient.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from forge_algos.losses._rows import LogitPass, LogitSource, Needs, Tensors, needs_of


def fused_sum(source: LogitSource, tensors: Tensors, terms: Callable[[LogitPass], torch.Tensor]) -> torch.Tensor:
    """Sum `terms(logit_pass)`[M] into a scalar whose gradients are computed in the forward pass.

    The gradients are released by the backward pass, so that it can run once.
    """
    return _FusedSum.apply(source, terms, needs_of(tensors), *tensors)


class _FusedSum(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, source: LogitSource, terms: Callable[[LogitPass], torch.Tensor], needs: Needs, *tensors: torch.Tensor | None
    ) -> torch.Tensor:
        logit_pass = source.start(tensors, needs)
        # Autocast would add casts to each product.
        with torch.autocast(_kind(tensors), enabled=False):
            losses = terms(logit_pass)
            ctx.grads = logit_pass.gradients()
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]  the decorator hides the names
        ctx: Any, *grad_outputs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError(
                "this loss gives its gradients once, to save memory; run the forward again before a second backward"
            )
        return (None, None, None, *(None if g is None else g.mul_(grad_outputs[0]) for g in grads))


def _kind(tensors: Tensors) -> str:
    return next(tensor.device.type for tensor in tensors if tensor is not None)
