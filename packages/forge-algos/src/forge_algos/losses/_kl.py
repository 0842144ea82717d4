"""Estimates of the KL divergence of a policy from its reference, on sampled tokens."""

import torch

from forge_algos.losses import _check
from forge_algos.losses._numeric import finite_exp
from forge_algos.losses._terms import LossTerms, summed

ESTIMATORS = ("k1", "k2", "k3")


def kl(logps: torch.Tensor, ref_logps: torch.Tensor, *, estimator: str = "k3") -> LossTerms:
    """Estimate KL(π‖π_ref) from tokens that π sampled, a term a token.

    With d = log π/π_ref: k1 = d, unbiased and often negative; k2 = d²/2, biased, never negative; k3 = e^-d - 1 + d, unbiased
    and never negative. As part of a loss k1's gradient is 0 in expectation and k2's is that of the true KL; so k1 belongs into
    rewards. Exponents above 40 (300 in float64) count as that.

    Args:
        logps: float[T], the policy's log-probabilities, in nats.
        ref_logps: float[T], the reference's; no gradient reaches them.
        estimator: k1, k2 or k3.

    Returns:
        LossTerms: over the T tokens; no token's term depends on another.

    Raises:
        LossError: lengths that disagree, or an unknown estimator.

    >>> kl(torch.tensor([-1.0]), torch.tensor([-2.0]), estimator="k1").sum.item()
    1.0
    >>> round(kl(torch.tensor([-1.0]), torch.tensor([-2.0])).sum.item(), 4)
    0.3679
    """
    _check.one_of("estimator", estimator, ESTIMATORS)
    given = _check.samples(logps=logps, ref_logps=ref_logps)
    return summed(estimate(given["logps"] - given["ref_logps"].detach(), estimator))


def estimate(d: torch.Tensor, estimator: str) -> torch.Tensor:
    """Compute the estimator's terms from log-ratios d = log π/π_ref, elementwise."""
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d.square() / 2
    return finite_exp(-d) - 1 + d
