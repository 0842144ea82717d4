"""Numerics that several losses share: wide sums, exponentials that stay finite, log(1 - eˣ)."""

import math

import torch

EXPONENT_LIMIT = {torch.float32: 40.0, torch.float64: 300.0}
"""Largest exponents by dtype: their squares are finite,
so that values and gradients are too, squared or weighted."""


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def finite_exp(x: torch.Tensor) -> torch.Tensor:
    """Compute e^min(x, limit), without a gradient beyond the limit."""
    return x.clamp(max=EXPONENT_LIMIT[x.dtype]).exp()


def log1mexp(x: torch.Tensor) -> torch.Tensor:
    """Compute log(1 - eˣ) for x ≤ 0, elementwise.

    Probabilities that the dtype cannot distinguish from 1 count as the nearest that it can: the slope 1/x would meet a softmax
    whose own slope is an exact 0, and 0 · ∞ is NaN.
    """
    x = x.clamp(max=-torch.finfo(x.dtype).eps)
    # torch.where multiplies the slope of the branch not taken by 0; above, both slopes are kept finite.
    return torch.where(x > -math.log(2), torch.log(-torch.expm1(x)), torch.log1p(-torch.exp(x)))
