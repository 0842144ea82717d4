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
