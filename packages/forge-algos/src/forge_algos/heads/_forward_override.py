"""A layer whose own forward is another function for a while, called as ever: with its hooks, in its place in the model.

What divides a model over ranks gathers a layer's weights in hooks around its call, for the forward and again for the backward
pass. So what needs a layer's weight is computed inside the layer's call, where it is whole, and not beside the model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


@contextmanager
def swapped_forward(layer: nn.Module, forward: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    """Inside the block `layer(x)` runs its hooks around `forward(x)`."""
    before = vars(layer).get("forward")
    layer.forward = forward
    try:
        yield
    finally:
        # What was set on the layer hides its class's method; without it that is seen again.
        del layer.forward
        if before is not None:
            layer.forward = before


def computed_inside(
    model: nn.Module,
    layer: nn.Module,
    inputs: dict[str, Any],
    compute: Callable[[torch.Tensor], Sequence[torch.Tensor]],
    *,
    shape: Sequence[int] | None = None,
) -> tuple[torch.Tensor, ...]:
    """What `compute(hidden)` returns inside the layer's own call, during one forward of the model.

    Hidden is what the layer is fed, float[1, T, D] ([B, S, D] of documents in lines); the model is given zeros of `shape` in the place of
    the layer's output, by default one number for each place. A
    backward pass from any of the tensors runs through all of the model's output hooks first, so it may read weights.
    """
    found: list[Sequence[torch.Tensor]] = []

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        tensors = compute(hidden)
        found.append(tensors)
        return carry(tensors, hidden, (*hidden.shape[:-1], 1) if shape is None else shape)

    with swapped_forward(layer, forward):
        out = model(**inputs).logits
    (tensors,) = found
    return join(tensors, out)


def computed_beside(
    model: nn.Module, body: nn.Module, inputs: dict[str, Any], compute: Callable[[torch.Tensor], torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(the model's logits, what `compute(hidden)` returns), hidden being what the body of the model gives, float[1, T, D].

    A backward pass from either runs through the model's output hooks first.
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
    """Stand-in for a layer's output, zeros of `shape` in `like`'s dtype and device, that hang on the tensors."""
    return _Carry.apply(like.detach(), shape, *tensors)


def join(tensors: Sequence[torch.Tensor], carrier: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The tensors, whose backward pass runs through `carrier` too, so that hooks on the outputs of all modules see it first.

    Sharded modules gather their weights for the backward pass in such hooks. The gradients do not change by a bit: what comes
    back through the carrier is dropped.
    """
    return _Join.apply(carrier, *tensors)


class _Carry(torch.autograd.Function):
    """Tensors → zeros of a shape, through which a backward pass reaches them and to which it adds nothing."""

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
    """(hidden, tensors) → hidden; backward its gradient passes on, and only then do the tensors' own passes begin."""

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
    """(what became of the carrier, tensors) → the tensors, the same; backward it starts the path that the forward took."""

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
