"""LossTerms: the result of every loss, a sum and its count, not divided yet."""

from collections.abc import Mapping
from typing import NamedTuple

import torch


class LossTerms(NamedTuple):
    """A loss before its division: a sum, and the number of terms that were summed."""

    sum: torch.Tensor
    """float32[], in nats; backward runs from it."""
    count: float
    """Number of terms: learned tokens, pairs, completions. Where they have weights, the sum of these."""
    stats: Mapping[str, torch.Tensor] = {}
    """Further sums over the same terms, detached, by name."""
    per_sample: torch.Tensor | None = None
    """float32[count]: the terms in the order of the input, still part of the graph;
    they add up to `sum`. None where a loss does not keep them (the chunked `nll`)."""


def summed(per_sample: torch.Tensor, stats: Mapping[str, torch.Tensor] | None = None) -> LossTerms:
    """Sum terms[N] and further values[N] by name, with the count N."""
    sums = {name: values.detach().to(per_sample.dtype).sum() for name, values in (stats or {}).items()}
    return LossTerms(per_sample.sum(), len(per_sample), sums, per_sample)
