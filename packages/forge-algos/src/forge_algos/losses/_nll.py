"""Summed negative log-likelihood from hidden states and a head, without ever holding [T, V].

Only rows that have a target are scored, `chunk_rows` at a time, and their gradients are computed in the forward pass.
"""

import attrs
import torch

from forge_algos.batches._packed import IGNORE
from forge_algos.losses import _check
from forge_algos.losses._fused_backward import fused_sum
from forge_algos.losses._rows import CHUNK_ROWS, Given, LogitPass, LogitSource, Projected, Tensors, product_dtype
from forge_algos.losses._terms import LossTerms


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


def nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    dft: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    ignore_index: int | None = IGNORE,
    token_weights: torch.Tensor | None = None,
    chunk_rows: int = CHUNK_ROWS,
) -> LossTerms:
    """Sum -log softmax(logits)[target] over the rows that have a target.

    Equals `torch.nn.functional.cross_entropy(..., reduction="sum")` in value and gradients for any upstream gradient. The
    products run in the weight's dtype, or autocast's where that is on; all that follows them is float32 (float64 where the
    weight is). The gradients are released by the backward pass, so that it can run once.

    Args:
        hidden: float[T, D], what the decoder gives.
        weight: float[V, D], the head; no gradient is computed for it where it needs none.
        targets: int64[T], ids in [0, V), or `ignore_index`.
        bias: float[V].
        scale: multiplies the logits (Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`).
        softcap: logits become softcap · tanh(logits / softcap), as in Gemma 2.
        dft: each token's cost is multiplied by its probability, without a gradient through that (arXiv 2508.05629).
        label_smoothing: ε from 0 and below 1; a token costs (1-ε)·nll + ε·mean over V of -log p, as torch's cross entropy has
            it.
        z_loss: λ from 0; λ·(log Σ e^logit)² is added for each token, which neither of the two above touches.
        ignore_index: rows with this target are left out. None: every row has a target; nothing is looked up, so
            nothing waits for the device.
        token_weights: float[T] from 0; each row's cost, and its share in the count and the stats, is multiplied by its weight.
        chunk_rows: how many rows are scored at once, at most.

    Returns:
        LossTerms: the sum in nats, and the number of scored rows, or the sum of their weights. Stats: `correct` (no token is
        likelier than the target), `nll` (the plain one, whatever the variant).

    Raises:
        LossError: a number out of range, or weights that are not one a row.

    >>> h, w = torch.eye(3), torch.eye(3)
    >>> terms = nll(h, w, torch.tensor([0, -100, 2]))
    >>> round(terms.sum.item(), 4), terms.count, terms.stats["correct"].item()
    (1.1029, 2, 2.0)
    """
    if token_weights is not None:
        token_weights = _check.samples(token_weights=token_weights, targets=targets.float())["token_weights"]
        token_weights = token_weights if ignore_index is None else token_weights[targets != ignore_index]
    hidden, targets = labelled(hidden, targets, ignore_index)
    source = Projected(product=product_dtype(weight), scale=scale, softcap=softcap, chunk_rows=chunk_rows)
    likelihood = Likelihood(dft=dft, label_smoothing=label_smoothing, z_loss=z_loss)
    terms = nll_of_rows(source, (hidden, weight, bias), targets, likelihood, token_weights)
    return terms if token_weights is None else terms._replace(count=float(token_weights.cpu().sum(dtype=torch.float64)))


def nll_of_logits(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    dft: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    chunk_rows: int = CHUNK_ROWS,
) -> LossTerms:
    """Sum the same from logits[M, V] that a model has computed itself; every row has a target.
    It is computed in float32, in chunks of rows.
    """
    likelihood = Likelihood(dft=dft, label_smoothing=label_smoothing, z_loss=z_loss)
    return nll_of_rows(Given(given=logits.dtype, chunk_rows=chunk_rows), (logits,), targets, likelihood)


def labelled(hidden: torch.Tensor, targets: torch.Tensor, ignore_index: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and targets of the rows that have a target."""
    if ignore_index is None:
        return hidden, targets
    rows = (targets != ignore_index).nonzero().squeeze(1)
    if len(rows) == len(targets):
        return hidden, targets
    return hidden.index_select(0, rows), targets.index_select(0, rows)


def nll_of_rows(
    source: LogitSource,
    tensors: Tensors,
    targets: torch.Tensor,
    likelihood: Likelihood,
    weights: torch.Tensor | None = None,
) -> LossTerms:
    """Sum the same over rows[M] that all have a target, from any source of logits.

    The count is M, also with weights[M]: to add them up here would wait for the device.
    """
    if weights is not None:
        weights = weights.to(source.dtype)
    nll = torch.zeros(len(targets), dtype=source.dtype, device=targets.device)
    correct = torch.zeros_like(nll)

    def terms(logit_pass: LogitPass) -> torch.Tensor:
        losses = torch.empty_like(nll)
        for rows in logit_pass.chunks:
            logits = logit_pass.logits(rows)
            losses[rows], nll[rows], correct[rows] = _scored(logits, targets[rows], likelihood, slope=logit_pass.needed)
            if weights is not None:
                for values in (losses, nll, correct):
                    values[rows] *= weights[rows]
                if logit_pass.needed:
                    logits.mul_(weights[rows, None])
            if logit_pass.needed:
                logit_pass.backward(rows, logits)
        return losses

    loss = fused_sum(source, tensors, terms)
    return LossTerms(loss, len(targets), {"correct": correct.sum(), "nll": nll.sum()})


def _scored(
    logits: torch.Tensor, targets: torch.Tensor, likelihood: Likelihood, *, slope: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score logits[C, V], which are overwritten; with `slope` by the loss's slope.

    Returns:
        tuple: loss, plain nll, and whether the target is the likeliest token, [C] each.
    """
    smoothing, targets = likelihood.label_smoothing, targets[:, None]
    top = logits.amax(1, keepdim=True)
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
    return loss.squeeze(1), nll.squeeze(1), (own == 0).squeeze(1).to(nll.dtype)
