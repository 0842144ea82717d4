"""What every loss returns: a sum and what it was summed over, apart until the whole global batch is known."""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class LossTerms(NamedTuple):
    """A loss that nobody has divided yet."""

    sum: torch.Tensor
    """float32[], in nats; what backward runs from."""
    count: int
    """How many terms were summed: learned tokens, or pairs."""
    stats: Mapping[str, torch.Tensor] = {}
    """Further sums over the same terms, detached, by name."""
    per_sample: torch.Tensor | None = None
    """float32[count]: the terms themselves, in the order of the input and still part of the graph; None where no loss keeps
    them (the chunked `nll`). They add up to `sum`."""


def summed(per_sample: torch.Tensor, stats: Mapping[str, torch.Tensor] | None = None) -> LossTerms:
    """Terms[N] and further values[N] by name → their sums, with the count N."""
    sums = {name: values.detach().to(per_sample.dtype).sum() for name, values in (stats or {}).items()}
    return LossTerms(per_sample.sum(), len(per_sample), sums, per_sample)
