"""Generalised Jensen-Shannon divergence from a teacher's likeliest tokens alone."""

import math
from typing import NamedTuple

import torch

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._rows import Given, LogitSource, Tensors
from forge_algos.losses._terms import LossTerms
from forge_algos.losses.distillation._rows import Divergence, check_beta, sum_divergences

_NONE = -math.inf


class TopTokens(NamedTuple):
    """Likeliest tokens of a teacher at M positions, and what is left of its probability."""

    ids: torch.Tensor
    """int64[M, K]: different tokens; the first is one, and any id stands where there are fewer than K."""
    logps: torch.Tensor
    """float[M, K]: their log-probabilities, -inf where there is no token."""
    rest: torch.Tensor
    """float[M]: log of the probability of all other tokens together, -inf for none."""

    def part(self, rows: slice) -> "TopTokens":
        """Return the tokens of some positions."""
        return TopTokens(*(each[rows] for each in self))


def top_distillation(student_logits: torch.Tensor, top: TopTokens, *, beta: float = 0.5) -> LossTerms:
    """Sum the generalised JSD over the teacher's K tokens and one class of all others.

    The student's probabilities outside of the K are added up to a class, as TRL's `loss_add_tail` does, so that with K = V it
    is `losses.distillation` itself. Where `rest` is -inf the teacher's K probabilities are divided by their sum, and its
    probability of all others is 0, as in Axolotl's `kd`.

    Args:
        student_logits: float[M, V], at learned positions only; finite.
        top: of the teacher, at the same positions and temperature.
        beta: from 0 (forward KL) to 1 (reverse KL, infinite where `rest` is -inf and K is below V).

    Returns:
        LossTerms: over the M tokens, in nats. Stats: `kl`, KL(teacher ‖ student) over these classes.

    Raises:
        LossError: shapes that disagree, or β outside [0, 1].

    >>> logits = torch.tensor([[0.0, 0.0, 0.0, 0.0]])
    >>> top = TopTokens(torch.tensor([[2]]), torch.tensor([[0.5]]).log(), torch.tensor([0.5]).log())
    >>> round(top_distillation(logits, top, beta=0.0).sum.item(), 4)  # ½·ln(½ / ¼) + ½·ln(½ / ¾)
    0.1438
    """
    if student_logits.dim() != 2:
        raise LossError(f"student_logits: floats [tokens, vocabulary] are wanted, not {_check.described(student_logits)}")
    return top_distillation_of_rows(Given(given=student_logits.dtype), (student_logits,), top, beta=beta)


def top_distillation_of_rows(
    source: LogitSource, tensors: Tensors, top: TopTokens, *, beta: float, weights: torch.Tensor | None = None
) -> LossTerms:
    """Sum `top_distillation` over M rows, a chunk of the student's logits at a time.

    With weights[M] each row's divergence is multiplied by its weight; the count is M all the same.

    Raises:
        LossError: β outside [0, 1], or other numbers of rows.
    """
    check_beta(beta)
    (first, *_), number = tensors, len(top.ids)
    assert first is not None
    if len(first) != number or top.ids.shape != top.logps.shape or len(top.rest) != number or top.ids.dim() != 2:
        raise LossError(
            f"the shapes disagree: {len(first)} rows of the student, and of the teacher ids {list(top.ids.shape)}, logps "
            f"{list(top.logps.shape)}, rest {list(top.rest.shape)}"
        )

    def diverged(s: torch.Tensor, rows: slice, *, slope: bool) -> Divergence:
        return _diverged(s, top.part(rows), beta, slope=slope)

    return sum_divergences(source, tensors, diverged, weights)


def _diverged(s: torch.Tensor, top: TopTokens, beta: float, *, slope: bool) -> Divergence:
    """Compute the divergence of logits[C, V], which are overwritten.

    Returns:
        tuple: divergence[C]; KL(t‖s)[C]; the divergence's slope[C, V] with respect to s, or None.
    """
    s.sub_(s.logsumexp(1, keepdim=True))
    known = ~top.logps.isneginf()
    ids = torch.where(known, top.ids, top.ids[:, :1])
    listed = torch.zeros_like(s, dtype=torch.bool).scatter_(1, ids, True)  # noqa: FBT003 - the value
    own = s.gather(1, ids).masked_fill_(~known, _NONE)
    others = s.masked_fill(listed, _NONE).logsumexp(1)
    empty = others.isneginf()
    q = torch.cat((own, others[:, None]), 1)
    rest = top.rest.to(s.dtype).masked_fill(empty, _NONE)
    t = torch.cat((top.logps.to(s.dtype), rest[:, None]), 1).log_softmax(1)
    student_p, teacher_p = q.exp(), t.exp()
    forward_kl = _expected(teacher_p, t - q)
    if beta == 0:
        loss, of_class = forward_kl, student_p - teacher_p
    else:
        # As in the divergence over the whole vocabulary: at β=1 the mixture is t.
        mixture = t if beta == 1 else torch.logaddexp(q + math.log1p(-beta), t + math.log(beta))
        share = 1.0 if beta == 1 else 1 - beta
        ratio = (q - mixture).masked_fill(student_p == 0, 0)
        reverse = (student_p * ratio).sum(1)
        loss = share * reverse
        if beta < 1:
            loss = loss + beta * _expected(teacher_p, t - mixture)
        of_class = student_p * (ratio - reverse[:, None]) * share
    if not slope:
        return loss, forward_kl, None
    # A class moves each of its tokens by the token's share of it.
    within = s.sub_(others.masked_fill(empty, 0)[:, None]).exp_().mul_(of_class[:, -1:]).masked_fill_(listed, 0)
    return loss, forward_kl, within.scatter_add_(1, ids, of_class[:, :-1].masked_fill(~known, 0))


def _expected(p: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Sum p·values of each row, where what has no probability counts nothing."""
    return (p * values.masked_fill(p == 0, 0)).sum(1)


def top_of_rows(source: LogitSource, tensors: Tensors, k: int, *, below: int | None = None) -> TopTokens:
    """Find the k likeliest tokens of M rows, the likeliest first, without gradients.

    Ids from `below` on, which stand for no token, are none of them: their probability is of the rest.
    """
    logits, found = source.start(tensors, [False] * len(tensors)), []
    for rows in logits.chunks:
        s = logits.logits(rows)
        s.sub_(s.logsumexp(1, keepdim=True))
        tokens = s[:, :below]
        logps, ids = tokens.topk(min(k, tokens.shape[1]), dim=1)
        found.append(TopTokens(ids, logps, s.scatter_(1, ids, _NONE).logsumexp(1)))
    if not found:
        (first, *_) = tensors
        assert first is not None
        none = first.new_zeros(0, k)
        return TopTokens(none.long(), none.to(source.dtype), none.new_zeros(0, dtype=source.dtype))
    return TopTokens(*(torch.cat(parts) for parts in zip(*found, strict=True)))
