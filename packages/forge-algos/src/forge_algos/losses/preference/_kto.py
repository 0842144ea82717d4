"""Kahneman-Tversky loss of completions that are each desirable or undesirable."""

import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._terms import LossTerms, summed


def kto(
    logps: torch.Tensor,
    ref_logps: torch.Tensor,
    desirable: torch.Tensor,
    kl: torch.Tensor | float,
    *,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> LossTerms:
    """Sum weighted 1 - σ(±β(r - z)) with r = log π/π_ref, + where desirable, - where not.
    z = max(kl, 0) (arXiv 2402.01306, equation 7).

    What is coupled: z stands for KL(π‖π_ref) over a whole batch, so it is an argument. The paper estimates it as the mean of
    r over completions paired with other samples' prompts; take that mean over all pairs of the optimizer's step, on all ranks
    (before clamping), and give every call of the step the same number: then the loss does not depend on how the batch is
    cut. It gets no gradient. A batch of one class alone is as good as any.

    Args:
        logps: float[B], summed log-probabilities of the completions, in nats.
        ref_logps: float[B], the reference's.
        desirable: bool[B].
        kl: float[] or a number, in nats; below 0 counts as 0.
        beta: above 0.
        desirable_weight: multiplies the desirable terms, above 0; the paper balances n_d·w_d against n_u·w_u.
        undesirable_weight: multiplies the undesirable terms, above 0.

    Returns:
        LossTerms: over the B completions. Stats: `rewards` (β·r), and `chosen_rewards`, `rejected_rewards`, `desirable` for
            means
        by class.

    Raises:
        LossError: lengths that disagree, `desirable` that is no bool[B], `kl` that is no single number, or a number out of
            range.

    >>> at_start = torch.tensor([-20.0, -35.0])
    >>> kto(at_start, at_start, torch.tensor([True, False]), 0.0).per_sample
    tensor([0.5000, 0.5000])
    """
    _check.number("beta", beta, above=0)
    _check.number("desirable_weight", desirable_weight, above=0)
    _check.number("undesirable_weight", undesirable_weight, above=0)
    given = _check.samples(logps=logps, ref_logps=ref_logps)
    if not isinstance(desirable, torch.Tensor) or desirable.dtype != torch.bool or desirable.shape != logps.shape:
        raise LossError(f"desirable: bool{list(logps.shape)} is wanted, not {_check.described(desirable)}")
    if not isinstance(kl, torch.Tensor | float | int) or (isinstance(kl, torch.Tensor) and kl.numel() != 1):
        raise LossError(f"kl: one number for the whole batch is wanted, not {_check.described(kl)}")
    ratios = given["logps"] - given["ref_logps"].detach()
    z = torch.as_tensor(kl, dtype=ratios.dtype, device=ratios.device).detach().reshape(()).clamp(min=0)
    ones = torch.ones_like(ratios)  # of their dtype: a weight is not rounded to float32 beside float64
    sign = torch.where(desirable, ones, -ones)
    weight = torch.where(desirable, desirable_weight * ones, undesirable_weight * ones)
    rewards = beta * ratios
    stats = {
        "rewards": rewards,
        "chosen_rewards": torch.where(desirable, rewards, 0.0),
        "rejected_rewards": torch.where(desirable, 0.0, rewards),
        "desirable": desirable,
    }
    return summed(weight * torch.sigmoid(-sign * beta * (ratios - z)), stats)
