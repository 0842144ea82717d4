"""Weights that a row without images does not reach → gradients of zero.

Rows with images and others stand in one step, and on one rank a micro-batch may have none. A part beside the language that did
not compute would have no gradient there: ranks would wait for each other's, and an optimizer would pass over its weights in
some steps, by how the step is cut, with their decay and their averages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge_algos._modules import causal_model, embeddings, language_modules


@contextmanager
def idle_parts_take_part(model: nn.Module) -> Iterator[None]:
    """Let every trained weight beside the language part have a gradient in each backward pass.

    It is zero where nothing else is added to it. The weights join the graph at the embeddings, within the model's forward:
    where ranks divide them, they are gathered by then. Nothing happens where no such weight is trained.
    """
    language = language_modules(model)
    others = [module for module in causal_model(model).modules() if module not in language]
    # By name: what divides a model over ranks puts gathered weights in their places.
    places = [(module, name) for module in others for name, p in module.named_parameters(recurse=False) if p.requires_grad]
    layer = embeddings(model)
    if layer is None or not places:
        yield
        return

    def join(_layer: nn.Module, _args: Any, found: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return found
        return _Join.apply(found, *(getattr(module, name) for module, name in places))

    handle = layer.register_forward_hook(join)
    try:
        yield
    finally:
        handle.remove()


class _Join(torch.autograd.Function):
    """(embeddings, weights) → the embeddings; the weights' gradients are zeros without memory."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, embedded: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, ...]:
        zeros = [torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like]
        return (grad_outputs[0], *zeros)
