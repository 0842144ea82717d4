"""x, W, L, R → x (W + L Rᵀ)ᵀ + b, with gradients for x, b, and whichever of L and R train.

W is frozen. Whether the product with L Rᵀ is taken on the side of the activations or of the weights is decided by counted
multiplications, for each pass by itself. T rows, W float[N, M], L float[N, r], R float[M, r], in multiplications and per pass
beside the T·N·M of W itself:

    forward    activations T·r·(M + N)    weights N·M·r (and T·M·r for x R, where the backward pass will want it)
    backward   activations T·r·(N + M)    weights N·M·r again, for W + L Rᵀ is not kept (and T·N·r for ∂y L, where R trains)

A long row so pays for W + L Rᵀ and a short one does not. The frozen W wants no gradient, whose T·N·M pay for all of it.
"""

from typing import Any

import torch
from torch.nn import functional

Pair = tuple[torch.Tensor, torch.Tensor]


def moved_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    left: torch.Tensor,
    right: torch.Tensor,
    without: Pair | None = None,
) -> torch.Tensor:
    """Compute x float[..., M] through weight[N, M] + left[N, r] rightᵀ[r, M]: float[..., N].

    Where `without` is given, without[0] without[1]ᵀ is subtracted from the weight. Products are taken in autocast's dtype where
    it is on, and in the weight's otherwise, as a linear layer's are.
    """
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
    minus, times = without or (None, None)
    with torch.autocast(kind, enabled=False):
        # Gradients of the factors and of x keep their dtypes, since autograd sees the casts.
        # Flat here, not inside: what is added in place to the result (Llama 4 does) may not be a view from inside.
        flat = x.to(dtype).reshape(-1, x.shape[-1])
        y: Any = _Moved.apply(flat, weight, bias, left.to(dtype), right.to(dtype), minus, times)
        return y.view(*x.shape[:-1], weight.shape[0])


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        flat: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        left: torch.Tensor,
        right: torch.Tensor,
        minus: torch.Tensor | None,
        times: torch.Tensor | None,
    ) -> torch.Tensor:
        N, M = weight.shape
        _, _, _, left_trains, right_trains, *_ = ctx.needs_input_grad
        # Where R is frozen the backward pass needs x R alone: r numbers a row are kept instead of M.
        wants_product = left_trains and not right_trains
        whole_left, whole_right = _joined(left, right, minus, times)
        T, r = len(flat), whole_left.shape[1]
        product = None
        if N * M * r + T * M * r * wants_product < T * r * (M + N):
            y = functional.linear(flat, _sum(weight, whole_left, whole_right), _cast(bias, flat))
        else:
            product = flat @ whole_right
            y = functional.linear(flat, weight.to(flat.dtype), _cast(bias, flat)).addmm_(product, whole_left.t())
        if wants_product:
            product = flat @ right if product is None else product[:, : right.shape[1]]
        # W itself, not a copy: where W is divided over ranks, it is gathered again in the same tensor.
        ctx.save_for_backward(
            flat if right_trains else None, product if wants_product else None, weight, left, right, minus, times
        )
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # type: ignore[override]
        flat, product, weight, left, right, minus, times = ctx.saved_tensors
        x_trains, _, bias_trains, left_trains, right_trains, *_ = ctx.needs_input_grad
        N, M = weight.shape
        dy = grads[0]
        whole_left, whole_right = _joined(left, right, minus, times)
        T, r = len(dy), whole_left.shape[1]
        dx = d_left = d_right = d_product = None
        if x_trains and N * M * r + T * N * r * right_trains < T * r * (N + M):
            dx = dy @ _sum(weight, whole_left, whole_right)
        elif x_trains:
            d_product = dy @ whole_left
            dx = (dy @ weight.to(dy.dtype)).addmm_(d_product, whole_right.t())
        if left_trains:
            d_left = dy.t() @ (flat @ right if product is None else product)
        if right_trains:
            own = dy @ left if d_product is None else d_product[:, : left.shape[1]]
            # A trained R is a transposed parameter [r, M]; in its layout gradients are added up fastest.
            d_right = (own.t() @ flat).t()
        d_bias = dy.sum(0) if bias_trains else None
        return dx, None, d_bias, d_left, d_right, None, None


def _joined(left: torch.Tensor, right: torch.Tensor, minus: torch.Tensor | None, times: torch.Tensor | None) -> Pair:
    """Join what is added and what is subtracted into one product, whose first columns train."""
    if minus is None or times is None:
        return left, right
    return torch.cat([left, -minus.to(left.dtype)], 1), torch.cat([right, times.to(right.dtype)], 1)


def _sum(weight: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Compute W + L Rᵀ in the dtype of L, added up in W's."""
    if weight.dtype == left.dtype:
        return torch.addmm(weight, left, right.t())
    return (weight + left @ right.t()).to(left.dtype)


def _cast(bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    return None if bias is None else bias.to(like.dtype)
