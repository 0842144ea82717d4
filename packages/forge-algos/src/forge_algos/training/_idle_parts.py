"""Weights that a row without images does not reach → gradients of zero.

Rows with images and others stand in one step, and on one rank a micro-batch may have none. A part beside the language that did
not compute would have no gradient there: ranks would wait for each other's, and an optimizer would pass over its weights in
some steps, by how the step is cut, with their decay and their averages. So would layers of the language part that attend to
images alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge_algos._modules import causal_model, embeddings, language_modules, layers_of_media


@contextmanager
def idle_parts_take_part(model: nn.Module, *, media: bool = False) -> Iterator[None]:
    """Let every trained weight beside the language part have a gradient in each backward pass.

    Where rows have `images`, so do those of the language part's layers that attend to images alone.
    It is zero where nothing else is added to it. The weights join the graph at the embeddings, by a node of the forward's
    beginning, where ranks that divide them have gathered them: what began first is last in the backward pass, so that ranks
    complete these gradients in the same order, whether their rows have images or not. ZeRO sums them in that order. Nothing
    happens where no such weight is trained.
    """
    language = language_modules(model) - (layers_of_media(model) if media else set())
    causal, layer = causal_model(model), embeddings(model)
    others = [module for module in causal.modules() if module not in language]
    # By name: what divides a model over ranks puts gathered weights in their places.
    places = [(module, name) for module in others for name, p in module.named_parameters(recurse=False) if p.requires_grad]
    if layer is None or not places:
        yield
        return
    held: list[torch.Tensor] = []

    def begin(_causal: nn.Module, _args: Any) -> None:
        held.clear()
        if torch.is_grad_enabled():
            held.append(_Weights.apply(*(getattr(module, name) for module, name in places)))

    def join(_layer: nn.Module, _args: Any, found: torch.Tensor) -> torch.Tensor:
        return _Join.apply(found, held.pop()) if held else found

    with causal.register_forward_pre_hook(begin), layer.register_forward_hook(join):
        yield


class _Weights(torch.autograd.Function):
    """Weights → an empty tensor; their gradients are zeros without memory."""

    @staticmethod
    def forward(ctx: Any, *weights: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]  torch's own is *args
        ctx.like = [(weight.shape, weight.dtype, weight.device) for weight in weights]
        return weights[0].new_empty(0)

    @staticmethod
    def backward(ctx: Any, *_grad_outputs: Any) -> tuple[torch.Tensor, ...]:
        return tuple(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)


class _Join(torch.autograd.Function):
    """(embeddings, empty tensor) → the embeddings."""

    @staticmethod
    def forward(ctx: Any, embedded: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:  # pyrefly: ignore[bad-override]
        ctx.none = weights
        return embedded.view_as(embedded)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, ...]:
        return grad_outputs[0], torch.zeros_like(ctx.none)
