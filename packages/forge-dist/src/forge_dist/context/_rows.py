"""Rows of which each context rank computes a part, with gradients exact for their sum."""

from itertools import pairwise
from typing import Any

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from forge_dist.context._gather import gather


class RowsOverRanks:
    """R ranks that have the same hidden states, of whose rows each computes a part."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._ranks = distributed.get_world_size(group)
        self._rank = distributed.get_rank(group)

    def part(self, rows: int) -> slice:
        """Return this rank's part of so many rows, contiguous; it may be empty."""
        return slice(*self._bounds(rows)[self._rank : self._rank + 2])

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks; collective."""
        return _Sum.apply(tensor, self._group)

    def gather(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Gather float[m] of each rank's part to float[rows], in order; collective."""
        bounds = self._bounds(rows)
        longest = -(-rows // self._ranks)
        order = torch.cat([torch.arange(stop - start) + rank * longest for rank, (start, stop) in enumerate(pairwise(bounds))])
        return gather(part[:, None], (order.to(part.device),), longest, self._group)[:, 0]

    def _bounds(self, rows: int) -> list[int]:
        return [rank * rows // self._ranks for rank in range(self._ranks + 1)]


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, tensor: torch.Tensor, group: ProcessGroup
    ) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        total = grad.clone()
        distributed.all_reduce(total, group=ctx.group)
        return total, None
