"""Replacement of a layer's forward for a while, called with its hooks and in its place.

What divides a model over ranks gathers a layer's weights in hooks around its call, for the forward and again for the backward
pass. So what needs a layer's weight is computed inside the layer's call, where it is whole, and not beside the model.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from forge_algos._modules import override_forward


def compute_inside(
    model: nn.Module,
    layer: nn.Module,
    inputs: dict[str, Any],
    compute: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    *,
    shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """Compute inside a layer's own call, during one forward of the model.

    Args:
        model: outermost module.
        layer: the layer, whose output is replaced.
        inputs: of the forward.
        compute: function of the layer's input float[1, T, D] ([B, S, D] of documents in lines).
        shape: of the zeros that the model gets as the layer's output; by default one number for each place.

    Returns:
        tuple: the tensors of `compute`. A backward pass from any of them runs through all of the model's output hooks first, so
            it may read weights.
    """
    found: list[Sequence[torch.Tensor]] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        tensors = compute(hidden)
        found.append(tensors)
        return carry(tensors, hidden, (*hidden.shape[:-1], 1) if shape is None else shape)

    with override_forward(layer, forward):
        out = model(**inputs).logits
    (tensors,) = found
    return join(tensors, out)


def compute_beside(
    model: nn.Module, body: nn.Module, inputs: dict[str, Any], compute: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute from the hidden states float[1, T, D] of the model's body, during one forward.

    Returns:
        tuple: the model's logits, and what `compute(hidden)` returns. A backward pass from either runs through the model's
            output hooks first.
    """
    found: list[torch.Tensor] = []

    def seen(_module: nn.Module, _args: Any, output: Any) -> Any:
        found.append(compute(output.last_hidden_state))
        output.last_hidden_state = _Tie.apply(output.last_hidden_state, *found)
        return output

    handle = body.register_forward_hook(seen)
    try:
        logits = model(**inputs).logits
    finally:
        handle.remove()
    (tensor,) = found
    (tensor,) = join([tensor], logits)
    return logits, tensor


def carry(tensors: Sequence[torch.Tensor], like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Make zeros of `shape` for a layer's output that depend on the tensors in the graph.
    Dtype and device are those of `like`.
    """
    return _Carry.apply(like.detach(), shape, *tensors)


def join(tensors: Sequence[torch.Tensor], carrier: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors, whose backward pass runs through `carrier` too.

    So hooks on the outputs of all modules see it first; sharded modules gather their weights for the backward pass in such
    hooks. The gradients do not change by a bit: what comes back through the carrier is dropped.
    """
    return _Join.apply(carrier, *tensors)


class _Carry(torch.autograd.Function):
    """Tensors → zeros through which a backward pass reaches them and to which it adds nothing."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, like: torch.Tensor, shape: Sequence[int], *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.number = len(tensors)
        return like.new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *_grad_outputs: Any) -> tuple[None, ...]:
        return (None,) * (2 + ctx.number)


class _Tie(torch.autograd.Function):
    """(hidden, tensors) → hidden; its gradient passes on before the tensors' own passes begin."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, hidden: torch.Tensor, *tensors: torch.Tensor
    ) -> torch.Tensor:
        ctx.number = len(tensors)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor | None, ...]:
        return (grad_outputs[0], *(None,) * ctx.number)


class _Join(torch.autograd.Function):
    """(carrier, tensors) → the tensors; their backward pass runs through the carrier too."""

    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, carrier: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.carrier = carrier.shape, carrier.dtype, carrier.device
        return tuple(tensor.clone() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> tuple[torch.Tensor, ...]:
        shape, dtype, device = ctx.carrier
        return (torch.zeros(shape, dtype=dtype, device=device), *grad_outputs)
