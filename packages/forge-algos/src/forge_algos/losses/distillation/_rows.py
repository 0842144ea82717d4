"""Generalised Jensen-Shannon divergence of rows, a chunk of both models' logits at a time."""

import math
from typing import Protocol, TypeAlias

import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._fused_backward import fused_sum
from forge_algos.losses._rows import LogitPass, LogitSource, Tensors
from forge_algos.losses._terms import LossTerms

Divergence: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Of C rows: the divergence[C], KL(teacher ‖ student)[C], and the divergence's slope[C, V] by the logits, or None."""


def distillation_of_rows(
    source: LogitSource,
    tensors: Tensors,
    teacher: tuple[LogitSource, Tensors],
    *,
    beta: float,
    weights: torch.Tensor | None = None,
) -> LossTerms:
    """Sum `losses.distillation` over M rows, from any sources of the two models' logits.
    The temperature is that of the sources.

    With weights[M] each row's divergence is multiplied by its weight; the count is M all the same.

    Stats: `kl`, KL(teacher ‖ student), whatever β.

    Raises:
        LossError: β outside [0, 1], or two vocabularies.
    """
    check_beta(beta)
    teacher_source, teacher_tensors = teacher
    theirs = teacher_source.start(teacher_tensors, [False] * len(teacher_tensors))

    def diverged(s: torch.Tensor, rows: slice, *, slope: bool) -> Divergence:
        t = theirs.logits(rows).to(source.dtype)
        if s.shape != t.shape:
            raise LossError(
                f"the student has a vocabulary of {s.shape[1]} tokens and its teacher one of {t.shape[1]}: both give a "
                "probability to each token, so take a teacher with the student's tokenizer"
            )
        return _diverged(s, t, beta, slope=slope)

    return sum_divergences(source, tensors, diverged, weights)


def check_beta(beta: float) -> None:
    """Raise LossError unless β of a JSD is a number from 0 to 1."""
    _check.number("beta", beta, least=0)
    if beta > 1:
        raise LossError(f"beta: a number from 0 to 1 is wanted, not {beta!r}")


class OfChunk(Protocol):
    """Divergence of a chunk of the student's logits."""

    def __call__(self, s: torch.Tensor, rows: slice, *, slope: bool) -> Divergence:
        """Compute it from logits[C, V], which may be overwritten."""
        ...


def sum_divergences(source: LogitSource, tensors: Tensors, of_chunk: OfChunk, weights: torch.Tensor | None) -> LossTerms:
    """Sum a divergence over M rows, a chunk of the student's logits at a time.

    With weights[M] each row's divergence is multiplied by its weight; the count is M all the same.
    """
    kl: list[torch.Tensor] = []
    counted: list[int] = []

    def terms(logit_pass: LogitPass) -> torch.Tensor:
        losses = [torch.zeros(0, dtype=source.dtype, device=_device(tensors))]
        for rows in logit_pass.chunks:
            loss, forward_kl, slope = of_chunk(logit_pass.logits(rows), rows, slope=logit_pass.needed)
            if weights is not None:
                shares = weights[rows].to(source.dtype)
                loss, forward_kl = loss * shares, forward_kl * shares
                slope = None if slope is None else slope.mul_(shares[:, None])
            losses.append(loss)
            kl.append(forward_kl)
            counted.append(rows.stop - rows.start)
            if slope is not None:
                logit_pass.backward(rows, slope)
        return torch.cat(losses)

    loss = fused_sum(source, tensors, terms)
    return LossTerms(loss, sum(counted), {"kl": torch.cat(kl).sum() if kl else loss.detach().clone()})


def _diverged(s: torch.Tensor, t: torch.Tensor, beta: float, *, slope: bool) -> Divergence:
    """Compute the divergence of logits[C, V], which are overwritten.

    Returns:
        tuple: divergence[C]; KL(t‖s)[C]; the divergence's slope[C, V] with respect to s, or None.
    """
    s.sub_(s.logsumexp(1, keepdim=True))
    t.sub_(t.logsumexp(1, keepdim=True))
    teacher_p = t.exp()
    forward_kl = (teacher_p * (t - s)).sum(1)
    if beta == 0:
        return forward_kl, forward_kl, s.exp_().sub_(teacher_p) if slope else None
    # With m the mixture, d/ds of β·KL(t‖m) + (1-β)·KL(s‖m) is (1-β)·log(s/m), then through the softmax; at β=1, m is t.
    mixture = t if beta == 1 else torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
    share = 1.0 if beta == 1 else 1 - beta
    student_p, ratio = s.exp(), s - mixture
    reverse = (student_p * ratio).sum(1)
    loss = share * reverse
    if beta < 1:
        loss = loss + beta * (teacher_p * (t - mixture)).sum(1)
    return loss, forward_kl, student_p.mul_(ratio.sub_(reverse[:, None])).mul_(share) if slope else None


def _device(tensors: Tensors) -> torch.device:
    return next(tensor.device for tensor in tensors if tensor is not None)
