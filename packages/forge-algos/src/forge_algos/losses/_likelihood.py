"""Logits of rows and their targets → losses, and the losses' slopes in the logits' place."""

import attrs
import torch

from forge_algos.losses import _check


@attrs.frozen(kw_only=True)
class Likelihood:
    """Loss of a token given the log-probabilities of all: -log p(target), or a variant of it.

    w · ((1-ε)·(-log p(target)) + ε·mean over V of -log p) + λ·(log Σ e^logit)²
    """

    dft: bool = False
    """Whether w = p(target), with no gradient through it (dynamic fine-tuning,
    arXiv 2508.05629), instead of w = 1."""
    label_smoothing: float = 0.0
    """ε, from 0 and below 1, as `torch.nn.functional.cross_entropy` has it."""
    z_loss: float = 0.0
    """λ, from 0: keeps the logits' normaliser near 1 (PaLM, arXiv 2204.02311, section 5,
    has 1e-4)."""

    def __attrs_post_init__(self) -> None:
        _check.number("label_smoothing", self.label_smoothing, least=0, below=1)
        _check.number("z_loss", self.z_loss, least=0)


Scores = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Of each row, [C]: the loss, the plain negative log-likelihood, and 1 where the target is argmax's token."""


def score_in_place(
    logits: torch.Tensor,
    targets: torch.Tensor,
    likelihood: Likelihood,
    weights: torch.Tensor | None,
    into: Scores,
    *,
    slope: bool,
) -> None:
    """Write the scores of logits[C, V] into three tensors, by torch's operators.

    Args:
        logits: float32 or float64[C, V], overwritten; with `slope` by the slope of the sum of the losses.
        targets: int64[C], in [0, V).
        likelihood: the loss.
        weights: [C]; multiplies the scores and the slope of each row.
        into: where the scores go.
        slope: whether the slope is wanted.
    """
    smoothing, targets = likelihood.label_smoothing, targets[:, None]
    top, likeliest = logits.max(1, keepdim=True)
    logits.sub_(top)
    own = logits.gather(1, targets)
    mean = logits.mean(1, keepdim=True) if smoothing else own
    total = logits.exp_().sum(1, keepdim=True)
    log_total = total.log()
    nll = log_total - own
    weight = nll.neg().exp() if likelihood.dft else torch.ones_like(nll)
    loss = weight * (nll + smoothing * (own - mean)) if smoothing or likelihood.dft else nll
    normaliser = log_total + top
    if likelihood.z_loss:
        loss = loss + likelihood.z_loss * normaliser.square()
    if slope:
        logits.mul_((weight + 2 * likelihood.z_loss * normaliser).div_(total))
        if smoothing:
            logits.sub_(weight * (smoothing / logits.shape[1]))
        logits.scatter_add_(1, targets, weight * (smoothing - 1))
        if weights is not None:
            logits.mul_(weights[:, None])
    for values, found in zip(into, (loss, nll, likeliest == targets), strict=True):
        values.copy_(found.squeeze(1))
        if weights is not None:
            values.mul_(weights)
