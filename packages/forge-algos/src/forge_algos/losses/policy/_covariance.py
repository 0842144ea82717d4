"""Tokens chosen by the covariance of log-probability and advantage, among all of a step's.

Steps on tokens of a large covariance are those after which a policy is certain (arXiv 2505.22617). `clip_cov` takes their term
away, `kl_cov` holds them near the policy that sampled. A choice couples tokens: make it once, for a whole step.
"""

import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._numeric import finite_exp

DECIMALS = 4
"""Digits by which covariances are compared: equal tokens in other rows differ by rounding, and are then chosen by lot."""


def covariances(logps: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Compute (log π - its mean)·(A - its mean) of each token (arXiv 2505.22617, equation 11).

    Args:
        logps: float[T], the policy's log-probabilities of a step's tokens, in nats.
        advantages: float[T].

    Returns:
        torch.Tensor: float64[T], detached.

    Raises:
        LossError: lengths that disagree.

    >>> covariances(torch.tensor([-1.0, -3.0]), torch.tensor([2.0, 0.0])).tolist()
    [1.0, 1.0]
    """
    given = _check.samples(logps=logps, advantages=advantages)
    new, a = given["logps"].detach().double(), given["advantages"].detach().double()
    return (new - new.mean()) * (a - a.mean()) if len(new) else new


def clip_cov_tokens(
    logps: torch.Tensor,
    old_logps: torch.Tensor,
    advantages: torch.Tensor,
    lots: torch.Tensor,
    *,
    share: float = 2e-4,
    least: float = 1.0,
    most: float = 5.0,
    clip: float = 0.2,
    clip_high: float | None = None,
) -> torch.Tensor:
    """Choose by lot tokens whose covariance lies between two bounds, at most `share` of all.

    It is Clip-Cov (arXiv 2505.22617, equations 12 and 13) as verl has it: a token that the ratio's clip holds already is none.
    `policy_gradient(kind="clip_cov", chosen=...)` leaves the chosen ones without a term.

    Args:
        logps: float[T], the policy's log-probabilities of all of a step's tokens, in nats.
        old_logps: float[T], those of the policy that sampled.
        advantages: float[T].
        lots: float[T], a number of each token: of those that could be chosen, the ones with the least numbers are.
        share: of the T tokens, above 0; rounded down, and one token at least.
        least: what the covariance is above.
        most: what it is below.
        clip: the ratio's bound, as of `policy_gradient`.
        clip_high: `clip` by default.

    Returns:
        torch.Tensor: bool[T].

    Raises:
        LossError: lengths that disagree, or a number out of range.
    """
    _check.number("share", share, above=0)
    if not least < most:
        raise LossError(f"least={least!r} is not below most={most!r}, so that no token could be chosen")
    given = _check.samples(logps=logps, old_logps=old_logps, advantages=advantages, lots=lots)
    new, a = given["logps"].detach().double(), given["advantages"].detach().double()
    ratio = finite_exp(new - given["old_logps"].detach().double())
    held = ratio.clamp(1 - clip, 1 + (clip if clip_high is None else clip_high))
    found = covariances(new, a)
    could = (found > least) & (found < most) & ~(-a * held > -a * ratio)
    at = could.nonzero().squeeze(1)
    return _marked(at[given["lots"][at].argsort(stable=True)[: _number(share, len(new))]], could)


def kl_cov_tokens(logps: torch.Tensor, advantages: torch.Tensor, lots: torch.Tensor, *, share: float = 2e-4) -> torch.Tensor:
    """Choose the tokens with the largest covariances, `share` of all.

    It is KL-Cov (arXiv 2505.22617, equations 14 and 15) as verl has it. `policy_gradient(kind="kl_cov", chosen=...)` adds
    |log π/π_old| to the terms of the chosen ones.

    Args:
        logps: float[T], the policy's log-probabilities of all of a step's tokens, in nats.
        advantages: float[T].
        lots: float[T], a number of each token, by which those of equal covariance (to four decimals) are chosen.
        share: of the T tokens, above 0; rounded down, and one token at least.

    Returns:
        torch.Tensor: bool[T].

    Raises:
        LossError: lengths that disagree, or a number out of range.
    """
    _check.number("share", share, above=0)
    given = _check.samples(logps=logps, advantages=advantages, lots=lots)
    found = covariances(given["logps"], given["advantages"]).round(decimals=DECIMALS)
    by_lot = given["lots"].argsort(stable=True)
    order = by_lot[found[by_lot].argsort(descending=True, stable=True)]
    return _marked(order[: _number(share, len(found))], found)


def _number(share: float, tokens: int) -> int:
    """Return how many tokens a share of them is: one at least."""
    return max(1, int(share * tokens))


def _marked(at: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(like, dtype=torch.bool)
    found[at] = True
    return found
