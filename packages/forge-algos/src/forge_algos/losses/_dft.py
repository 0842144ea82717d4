"""Dynamic fine-tuning: a loss of learned tokens in which each is weighed by its probability."""

import torch

from forge_algos.losses import _check
from forge_algos.losses._terms import LossTerms, summed


def dft(logps: torch.Tensor) -> LossTerms:
    """Sum -p · log p over tokens, without a gradient through the weight p (arXiv 2508.05629).

    Args:
        logps: float[T], log-probabilities of the learned tokens, in nats.

    Returns:
        LossTerms: over the T tokens; no token's term depends on another. Stats: `nll`.

    Raises:
        LossError: `logps` is no float[T].

    >>> terms = dft(torch.tensor([0.5, 0.25]).log())
    >>> round(terms.sum.item(), 4), terms.count
    (0.6931, 2)
    """
    logps = _check.samples(logps=logps)["logps"]
    return summed(-logps.detach().exp() * logps, {"nll": -logps})
