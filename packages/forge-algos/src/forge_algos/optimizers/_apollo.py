"""APOLLO: gradients scaled by the factors that AdamW has for a random projection of them.

Of a matrix's gradient G [A, B] a random projection onto r dimensions of the smaller side is made, R, and AdamW's moments of R
alone are kept. What AdamW would do to R, channel by channel (APOLLO) or as a whole (APOLLO-Mini), is done to G: arXiv
2412.05270, algorithm 1. Steps are those of the authors' package, apollo-torch 1.0.3, for the same projection.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, zeros as divided_zeros

from forge_algos.optimizers._closure import Numbered
from forge_algos.optimizers._divided import local, rows_here
from forge_algos.optimizers._rounding import random_bits

GROWTH = 1.01
"""How much larger than the last one a matrix's scaled gradient may be: the norm-growth limiter."""
_TINY = 1e-8
"""Added to norms that are divided by."""
_MOST = 256
"""Highest rank by default, that of the paper's models of 1B and 7B."""
_MOMENTS = ("projected_avg", "projected_avg_sq")


class Apollo(Numbered):
    """APOLLO (arXiv 2412.05270) of matrices [A, B] and stacks [E, A, B], each by itself.

    A parameter's state is `step`; both moments, [larger side, rank] of each matrix, which ranks divide as they divide the
    parameter; and `update_norm`, one number a matrix. Projections are not kept: they follow from the seed, the parameter's
    number and the step, on every rank and device.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float = 0.0,
        rank: int | None = None,
        update_interval: int = 200,
        scale: float | None = None,
        scale_type: str = "channel",
        seed: int = 0,
        numbers: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        """Take groups of matrices and stacks.

        Args:
            groups: as of torch's optimizers.
            lr: learning rate.
            betas: decay of both moments.
            eps: added to the denominator.
            weight_decay: decoupled, before a step, as torch's AdamW has it.
            rank: of projections, at most a matrix's smaller side; by default a quarter of that, at most 256.
            update_interval: steps after which another projection is drawn; the moments stay.
            scale: steps are multiplied by its square root; by default the smaller side divided by the rank, which makes
                them as large as AdamW's.
            scale_type: channel for APOLLO, a factor for each row or column of the larger side; tensor for APOLLO-Mini.
            seed: of the projections.
            numbers: each parameter's number, that its projections follow from; by default its place in `groups`.

        Raises:
            OptimizerError: ranks divide other parts than rows of a matrix or whole matrices of a stack.
        """
        options = {"rank": rank, "update_interval": update_interval, "scale": scale, "scale_type": scale_type}
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, **options}
        super().__init__(groups, defaults, name="apollo", seed=seed, numbers=numbers)

    def _move(self, parameter: nn.Parameter, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        smaller, rank = min(parameter.shape[-2:]), rank_of(parameter.shape, group["rank"])
        state = self.state[parameter]
        if not state:
            state.update(_new_state(parameter, rank))
        state["step"] += 1
        key = self._key(parameter, (state["step"] - 1) // group["update_interval"])
        G = local(gradient)
        R = _projected(gradient, projection(smaller, rank, key, like=G))
        N = _normalized(R, [local(state[name]) for name in _MOMENTS], group)
        factors = _factors(parameter, N, R, group)
        _limit_growth(parameter, G, factors, state)
        scale = smaller / rank if group["scale"] is None else group["scale"]
        beta1, beta2 = group["betas"]
        rate = group["lr"] * math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
        local(parameter).mul_(1 - group["lr"] * group["weight_decay"]).addcmul_(G, factors, value=-rate * math.sqrt(scale))


def rank_of(shape: Iterable[int], asked: int | None) -> int:
    """Return the rank of projections of a matrix or stack.

    >>> rank_of((4096, 11008), None), rank_of((576, 192), None), rank_of((576, 192), 256)
    (256, 48, 192)
    """
    smaller = min(tuple(shape)[-2:])
    return min(max(1, min(smaller // 4, _MOST)) if asked is None else asked, smaller)


def projection(smaller: int, rank: int, key: int, *, like: torch.Tensor) -> torch.Tensor:
    """Draw a random projection: normal with variance 1/rank, each number by its place.

    Args:
        smaller: dimensions of the gradient that are projected.
        rank: dimensions that they are projected onto.
        key: `rounding_key`.
        like: tensor with the dtype and device.

    Returns:
        torch.Tensor: [smaller, rank].
    """
    rows, columns = (torch.arange(size, dtype=torch.int32, device=like.device) for size in (smaller, rank))
    # The middles of 2^16 parts of the distribution.
    shares = random_bits(rows, columns, key).to(torch.float32).add_(0.5).mul_(2**-15).sub_(1)
    return shares.erfinv_().mul_(math.sqrt(2 / rank)).to(like.dtype)


def _new_state(parameter: nn.Parameter, rank: int) -> dict[str, Any]:
    shape = (*parameter.shape[:-2], max(parameter.shape[-2:]), rank)
    norms = _zeros(parameter, parameter.shape[:-2]) if parameter.dim() > 2 else local(parameter).new_zeros(())
    return {"step": 0, **{name: _zeros(parameter, shape) for name in _MOMENTS}, "update_norm": norms}


def _projected(gradient: torch.Tensor, P: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of the projected gradient, [larger side, rank] a matrix."""
    G = local(gradient)
    if gradient.shape[-2] >= gradient.shape[-1]:
        return G @ P
    if gradient.dim() > 2 or not isinstance(gradient, DTensor):
        return G.mT @ P
    first, count = rows_here(gradient, "apollo")
    return (
        _sum_of(G.mT @ P[first : first + count], gradient).redistribute(placements=gradient.placements).to_local().to(G.device)
    )


def _normalized(R: torch.Tensor, moments: list[torch.Tensor], group: Mapping[str, Any]) -> torch.Tensor:
    """Return AdamW's step of R before its bias is corrected, and change the moments."""
    average, square = moments
    beta1, beta2 = group["betas"]
    average.lerp_(R, 1 - beta1)
    square.mul_(beta2).addcmul_(R, R, value=1 - beta2)
    return average / square.sqrt().add_(group["eps"])


def _factors(parameter: nn.Parameter, N: torch.Tensor, R: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
    """Return the factors of what this process holds of the gradient, in a shape to multiply."""
    norm = torch.linalg.vector_norm
    if group["scale_type"] == "tensor":
        squares = torch.stack([norm(each, dim=(-2, -1)).square() for each in (N, R)])
        after, before = _added(squares, parameter).sqrt()
        return (after / (before + _TINY))[..., None, None]
    found = norm(N, dim=-1) / (norm(R, dim=-1) + _TINY)
    if parameter.shape[-2] >= parameter.shape[-1]:
        return found[..., None]
    if parameter.dim() == 2 and isinstance(parameter, DTensor):
        size = torch.Size(parameter.shape[1:])
        whole = DTensor.from_local(
            found, parameter.device_mesh, parameter.placements, run_check=False, shape=size, stride=(1,)
        ).full_tensor()
        found = whole.to(found.device)
    return found[..., None, :]


def _limit_growth(parameter: nn.Parameter, G: torch.Tensor, factors: torch.Tensor, state: dict[str, Any]) -> None:
    """Scale the factors down where the scaled gradient grows faster than `GROWTH`.

    A gradient of zeros, as of an expert without tokens, is no norm to grow from.
    """
    dim = -1 if factors.shape[-1] == 1 else -2
    by_channel = torch.linalg.vector_norm(G, dim=dim, keepdim=True) * factors
    now = _added(torch.linalg.vector_norm(by_channel, dim=(-2, -1)).square(), parameter).sqrt()
    before = local(state["update_norm"])
    limits = torch.where(before > 0, (now / (before + _TINY)).clamp(min=GROWTH) / GROWTH, 1.0)
    factors.div_(limits[..., None, None])
    before.copy_(torch.where(now > 0, now / limits, before))


def _zeros(parameter: nn.Parameter, shape: tuple[int, ...]) -> torch.Tensor:
    """Return zeros, divided as the parameter is."""
    held: torch.Tensor = parameter.detach()
    if not isinstance(held, DTensor):
        return held.new_zeros(shape)
    made = divided_zeros(shape, dtype=held.dtype, device_mesh=held.device_mesh, placements=held.placements)
    return made.to(held.device)


def _added(squares: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Add over the ranks that divide one matrix."""
    if parameter.dim() > 2 or not isinstance(parameter, DTensor):
        return squares
    return _sum_of(squares, parameter).full_tensor().to(squares.device)


def _sum_of(part: torch.Tensor, divided: DTensor) -> DTensor:
    """Return the sum of what the ranks that divide a tensor have, not yet added."""
    placements = [Replicate() if placement.is_replicate() else Partial() for placement in divided.placements]
    return DTensor.from_local(part, divided.device_mesh, placements, run_check=False)
