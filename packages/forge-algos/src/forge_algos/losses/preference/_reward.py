"""Bradley-Terry loss of a reward model from the two rewards of a pair."""

import torch
from torch.nn.functional import logsigmoid

from forge_algos.losses import _check
from forge_algos.losses._terms import LossTerms, summed


def reward(
    chosen_rewards: torch.Tensor, rejected_rewards: torch.Tensor, *, margin: torch.Tensor | None = None, centering: float = 0.0
) -> LossTerms:
    """Sum -log σ(r_c - r_r - m) + λ(r_c + r_r)² over pairs.
    It is InstructGPT's (arXiv 2203.02155, equation 1), with m from Llama 2 (2307.09288, equation 2).

    A reward is known up to a constant only; λ pulls the mean of a pair towards 0 (arXiv 2312.09244).

    Args:
        chosen_rewards: float[B], the model's scalar for each pair's better completion.
        rejected_rewards: float[B], for the other.
        margin: float[B], how much better it should be; None is 0.
        centering: λ, from 0.

    Returns:
        LossTerms: over the B pairs; no pair's term depends on another. Stats: `correct` (r_c > r_r), `margins` (r_c - r_r),
        `chosen_rewards`, `rejected_rewards`.

    Raises:
        LossError: lengths that disagree, or a negative `centering`.

    >>> terms = reward(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]), margin=torch.tensor([0.0, 2.0]))
    >>> round(terms.sum.item(), 4), terms.count, terms.stats["correct"].item()
    (1.3863, 2, 1.0)
    """
    _check.number("centering", centering, least=0)
    given = _check.samples("margin", chosen_rewards=chosen_rewards, rejected_rewards=rejected_rewards, margin=margin)
    chosen, rejected = given["chosen_rewards"], given["rejected_rewards"]
    wanted = chosen - rejected - given["margin"] if "margin" in given else chosen - rejected
    losses = -logsigmoid(wanted)
    if centering:
        losses = losses + centering * (chosen + rejected).square()
    stats = {
        "correct": chosen > rejected,
        "margins": chosen - rejected,
        "chosen_rewards": chosen,
        "rejected_rewards": rejected,
    }
    return summed(losses, stats)
