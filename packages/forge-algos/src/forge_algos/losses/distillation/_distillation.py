"""Generalised Jensen-Shannon divergence between the logits of a student and a teacher."""

import math

import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._numeric import wide
from forge_algos.losses._terms import LossTerms, summed


def distillation(
    student_logits: torch.Tensor, teacher_logits: torch.Tensor, *, beta: float = 0.5, temperature: float = 1.0
) -> LossTerms:
    """Sum β·KL(t‖m) + (1-β)·KL(s‖m) with m = β·t + (1-β)·s over tokens.
    It is KL(t‖s) at β=0 and KL(s‖t) at β=1, the limits after division by β(1-β).

    GKD, arXiv 2306.13649, equation 1, for the teacher's t and the student's s after a softmax with the temperature. There is no
    factor temperature².

    Args:
        student_logits: float[M, V], at learned positions only; finite.
        teacher_logits: float[M, V], finite; no gradient reaches them.
        beta: from 0 (forward KL, covers) to 1 (reverse KL, seeks).
        temperature: above 0; divides both logits.

    Returns:
        LossTerms: over the M tokens, in nats; no token's term depends on another. Stats: `agreed` (the same best token).

    Raises:
        LossError: shapes that disagree, or a number out of range.

    >>> student, teacher = torch.tensor([[0.0, 0.0]]), torch.tensor([[0.75, 0.25]]).log()
    >>> round(distillation(student, teacher, beta=0.0).sum.item(), 4)  # ln 2 - H(1/4)
    0.1308
    >>> round(distillation(teacher, teacher).sum.item(), 6)
    0.0
    """
    _check.number("beta", beta, least=0)
    _check.number("temperature", temperature, above=0)
    if beta > 1:
        raise LossError(f"beta: a number from 0 to 1 is wanted, not {beta!r}")
    for name, logits in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or logits.dim() != 2:
            raise LossError(f"{name}: a tensor of floats [tokens, vocabulary] is wanted, not {_check.described(logits)}")
    if student_logits.shape != teacher_logits.shape:
        raise LossError(
            f"the shapes disagree: student_logits {list(student_logits.shape)}, teacher_logits {list(teacher_logits.shape)}; "
            "both are over the same tokens and the same vocabulary"
        )
    dtype = torch.promote_types(wide(student_logits.dtype), teacher_logits.dtype)
    s = (student_logits.to(dtype) / temperature).log_softmax(-1)
    t = (teacher_logits.detach().to(dtype) / temperature).log_softmax(-1)
    if beta == 0:
        losses = _kl(t, s)
    elif beta == 1:
        losses = _kl(s, t)
    else:
        m = torch.logaddexp(s + math.log1p(-beta), t + math.log(beta))
        losses = beta * _kl(t, m) + (1 - beta) * _kl(s, m)
    return summed(losses, {"agreed": s.argmax(-1) == t.argmax(-1)})


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Compute KL(p‖q) of each row, from log-probabilities."""
    return (p.exp() * (p - q)).sum(-1)
