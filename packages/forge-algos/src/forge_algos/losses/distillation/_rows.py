"""Generalised Jensen-Shannon divergence of rows, a chunk of both models' logits at a time."""

import math

import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._fused_backward import fused_sum
from forge_algos.losses._rows import LogitPass, LogitSource, Tensors
from forge_algos.losses._terms import LossTerms


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
    _check.number("beta", beta, least=0)
    if beta > 1:
        raise LossError(f"beta: a number from 0 to 1 is wanted, not {beta!r}")
    teacher_source, teacher_tensors = teacher
    theirs = teacher_source.start(teacher_tensors, [False] * len(teacher_tensors))
    kl: list[torch.Tensor] = []

    def terms(logit_pass: LogitPass) -> torch.Tensor:
        losses = [torch.zeros(0, dtype=source.dtype, device=_device(tensors))]
        for rows in logit_pass.chunks:
            s, t = logit_pass.logits(rows), theirs.logits(rows).to(source.dtype)
            if s.shape != t.shape:
                raise LossError(
                    f"the student has a vocabulary of {s.shape[1]} tokens and its teacher one of {t.shape[1]}: both give a "
                    "probability to each token, so take a teacher with the student's tokenizer"
                )
            loss, forward_kl, slope = _diverged(s, t, beta, slope=logit_pass.needed)
            if weights is not None:
                shares = weights[rows].to(source.dtype)
                loss, forward_kl = loss * shares, forward_kl * shares
                slope = None if slope is None else slope.mul_(shares[:, None])
            losses.append(loss)
            kl.append(forward_kl)
            if slope is not None:
                logit_pass.backward(rows, slope)
        return torch.cat(losses)

    loss = fused_sum(source, tensors, terms)
    count = sum(rows.stop - rows.start for rows in theirs.chunks)
    return LossTerms(loss, count, {"kl": torch.cat(kl).sum() if kl else loss.detach().clone()})


def _diverged(
    s: torch.Tensor, t: torch.Tensor, beta: float, *, slope: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
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
