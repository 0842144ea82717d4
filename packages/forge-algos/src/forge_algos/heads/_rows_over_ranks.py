"""Division of scored rows over ranks that share a packed row.

A package that cuts packed rows over ranks, such as forge_dist, sets `NAME` on the causal model; packages agree by shape, so
this file states the shape. What the ranks exchange has exact gradients for the sum of what each of them computes.
"""

from typing import Protocol

import torch
from torch import nn

from forge_algos._modules import causal_model

NAME = "rows_over_ranks"
"""Attribute of a causal model whose rows several ranks share."""


class RowsOverRanks(Protocol):
    """Ranks that have the same hidden states, and divide what is computed from them."""

    def part(self, rows: int) -> slice:
        """Return this rank's part of so many rows, contiguous; it may be empty."""
        ...

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Add up a tensor over the ranks; collective."""
        ...

    def gather(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        """Gather float[m] of each rank's part to float[rows], in order; collective."""
        ...


class Whole:
    """A single rank, which computes all rows."""

    def part(self, rows: int) -> slice:
        """Return all rows."""
        return slice(0, rows)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor."""
        return tensor

    def gather(self, part: torch.Tensor, rows: int) -> torch.Tensor:  # noqa: ARG002  the protocol's
        """Return the tensor."""
        return part


_WHOLE = Whole()


def rows_over_ranks(model: nn.Module) -> RowsOverRanks:
    """Return how the scored rows of a model are divided over ranks; all are here by default."""
    return getattr(causal_model(model), NAME, _WHOLE)
