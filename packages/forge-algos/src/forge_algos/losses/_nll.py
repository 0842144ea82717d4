"""Summed negative log-likelihood from hidden states and a head, without ever holding [T, V].

Only rows that have a target are scored, `chunk_rows` at a time, and their gradients are computed in the forward pass.
"""

import math

import torch

from forge_algos._errors import LossError
from forge_algos.batches._packed import IGNORE
from forge_algos.losses import _check
from forge_algos.losses._fused_backward import fused_sum
from forge_algos.losses._likelihood import Likelihood
from forge_algos.losses._rows import CHUNK_ROWS, Given, LogitPass, LogitSource, Projected, Tensors, product_dtype
from forge_algos.losses._score_rows import score_rows
from forge_algos.losses._terms import LossTerms


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
        LossTerms: the sum in nats, and the number of scored rows, or the sum of their weights. Stats: `correct` (the
        target is the likeliest token, the first of equals), `nll` (the plain one, whatever the variant).

    Raises:
        LossError: a number out of range, targets or weights that are not one a row, weights that are not finite or below 0.

    >>> h, w = torch.eye(3), torch.eye(3)
    >>> terms = nll(h, w, torch.tensor([0, -100, 2]))
    >>> round(terms.sum.item(), 4), terms.count, terms.stats["correct"].item()
    (1.1029, 2, 2.0)
    """
    _check.targets(targets, hidden, "hidden")
    _check.number("chunk_rows", chunk_rows, least=1)
    total = 0.0
    if token_weights is not None:
        token_weights = _check.samples(token_weights=token_weights, targets=targets.float())["token_weights"]
        token_weights = token_weights if ignore_index is None else token_weights[targets != ignore_index]
        counted = token_weights.cpu()
        total = float(counted.sum(dtype=torch.float64))
        if not math.isfinite(total) or (counted < 0).any():
            raise LossError("token_weights: finite numbers from 0 are wanted; leave a token out by its target, ignore_index")
    hidden, targets = labelled(hidden, targets, ignore_index)
    source = Projected(product=product_dtype(weight), scale=scale, softcap=softcap, chunk_rows=chunk_rows)
    likelihood = Likelihood(dft=dft, label_smoothing=label_smoothing, z_loss=z_loss)
    terms = nll_of_rows(source, (hidden, weight, bias), targets, likelihood, token_weights)
    return terms if token_weights is None else terms._replace(count=total)


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

    Raises:
        LossError: a number out of range, or targets that are not one a row.
    """
    _check.targets(targets, logits, "logits")
    _check.number("chunk_rows", chunk_rows, least=1)
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
            slope = score_rows(
                logit_pass.logits(rows),
                targets[rows],
                likelihood,
                None if weights is None else weights[rows],
                (losses[rows], nll[rows], correct[rows]),
                slope=logit_pass.slope_dtype,
            )
            if slope is not None:
                logit_pass.backward(rows, slope)
            del slope  # it may be as large as the next chunk's, beside which it would stay
        return losses

    loss = fused_sum(source, tensors, terms)
    return LossTerms(loss, len(targets), {"correct": correct.sum(), "nll": nll.sum()})
