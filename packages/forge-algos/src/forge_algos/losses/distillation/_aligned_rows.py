"""Distance between two models with two tokenizers, a chunk of both models' logits at a time."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from forge_algos.losses._fused_backward import fused_sum
from forge_algos.losses._rows import LogitPass, LogitSource, Tensors
from forge_algos.losses._terms import LossTerms
from forge_algos.losses._token_logps import logps_of_rows
from forge_algos.losses.distillation._aligned import LEAST_PROBABILITY, SharedTokens

_LEAST = math.log(LEAST_PROBABILITY)


class Unshared(NamedTuple):
    """Ids of the tokens that only one of two vocabularies has."""

    ours: torch.Tensor
    """int64[u], of the student's logits."""
    theirs: torch.Tensor
    """int64[v], of the teacher's."""


class SpanRows(NamedTuple):
    """Rows of one model's logits that G spans of text are predicted at."""

    last: torch.Tensor
    """int64[G]: the row that predicts the last token of each."""
    before: torch.Tensor
    """int64[E]: the rows that predict the tokens before the last of all spans, span after span."""
    targets: torch.Tensor
    """int64[E]: those tokens."""
    of: torch.Tensor
    """int64[E]: the span that each belongs to, ascending."""

    def of_spans(self, spans: slice) -> "SpanRows":
        """Return those of contiguous spans."""
        inside = (self.of >= spans.start) & (self.of < spans.stop)
        return SpanRows(self.last[spans], self.before[inside], self.targets[inside], self.of[inside] - spans.start)


def aligned_of_rows(
    source: LogitSource,
    tensors: Tensors,
    teacher: tuple[LogitSource, Tensors],
    before: tuple[torch.Tensor, torch.Tensor],
    *,
    shared: SharedTokens,
    unshared: Unshared,
    parts: tuple[float, float],
    beta: float,
    weights: torch.Tensor | None = None,
) -> LossTerms:
    """Sum `losses.aligned_distillation` over G spans, from any sources of the two logits.

    The temperature is that of the sources.

    Args:
        source: of the student's logits.
        tensors: from which they are computed, a row for the last token of each span.
        teacher: the same of the teacher.
        before: float[G] each, log-probability of a span's tokens before the last, by the student and by the teacher.
        shared: tokens of both vocabularies.
        unshared: the others.
        parts: weights of the two parts of a term.
        beta: from 0 to 1.
        weights: float32[G], which multiply the terms; the count is G all the same.
    """
    teacher_source, teacher_tensors = teacher
    theirs = teacher_source.start(teacher_tensors, [False] * len(teacher_tensors))
    ours_before, theirs_before = before[0].detach().to(source.dtype), before[1].to(source.dtype)
    figures: list[torch.Tensor] = []
    slopes: list[torch.Tensor] = []

    def terms(logit_pass: LogitPass) -> torch.Tensor:
        losses = [torch.zeros(0, dtype=source.dtype, device=ours_before.device)]
        for rows in logit_pass.chunks:
            s, t = logit_pass.logits(rows), theirs.logits(rows).to(source.dtype)
            c = ours_before[rows, None]
            s.sub_(s.logsumexp(1, keepdim=True) - c)
            t.sub_(t.logsumexp(1, keepdim=True) - theirs_before[rows, None])
            found = _distance(s, t, shared, unshared, parts, beta, slope=logit_pass.needed)
            shares = None if weights is None else weights[rows].to(source.dtype)
            both = torch.stack(found[:2])
            figures.append(both if shares is None else both * shares)
            loss = parts[0] * found[0] + parts[1] * found[1]
            losses.append(loss if shares is None else loss * shares)
            if (slope := found[2]) is not None:
                if shares is not None:
                    slope.mul_(shares[:, None])
                # Of the logarithm of the span's distribution: it is moved by the logits, and by what stands before.
                total = slope.sum(1, keepdim=True)
                slopes.append(total[:, 0])
                logit_pass.backward(rows, slope.sub_(s.sub_(c).exp_().mul_(total)))
        return torch.cat(losses)

    loss = fused_sum(source, tensors, terms)
    sums = torch.cat(figures, dim=1).sum(1) if figures else loss.detach().new_zeros(2)
    if slopes:
        # Adds nothing to the value: it carries the gradient to the rows before the last ones.
        loss = loss + (torch.cat(slopes) * (before[0] - before[0].detach())).sum()
    count = sum(rows.stop - rows.start for rows in theirs.chunks)
    return LossTerms(loss, count, {"matched": sums[0], "unmatched": sums[1]})


def logps_before(source: LogitSource, tensors: Tensors, rows: SpanRows) -> torch.Tensor:
    """Add up log-probabilities of each span's tokens before the last: float[G].

    `tensors` have a row for each of these tokens.
    """
    found = torch.zeros(len(rows.last), dtype=source.dtype, device=rows.last.device)
    if not len(rows.of):
        return found
    logps = logps_of_rows(source, tensors, rows.targets).clamp_min(_LEAST)
    return found.index_add(0, rows.of, logps.to(found.dtype))


def _distance(
    s: torch.Tensor,
    t: torch.Tensor,
    shared: SharedTokens,
    unshared: Unshared,
    parts: tuple[float, float],
    beta: float,
    *,
    slope: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Compute both parts of the distance between log-distributions[C, V] and [C, W].

    Returns:
        tuple: the JSD of shared tokens [C]; the L1 distance of the others [C]; the slope [C, V] of their weighted sum with
        respect to s, or None.
    """
    slope_CV = torch.zeros_like(s) if slope else None
    matched, unmatched = s.new_zeros(len(s)), s.new_zeros(len(s))
    if len(shared.ours):
        above = s[:, shared.ours]
        ours, theirs = above.clamp_min(_LEAST), t[:, shared.theirs].clamp_min_(_LEAST)
        p, q = ours.exp(), theirs.exp()
        if beta == 0:
            matched = (q * (theirs - ours)).sum(1)
            moved = -q
        elif beta == 1:
            moved = p * (ours - theirs)
            matched = moved.sum(1)
            moved = moved + p
        else:
            mixture = torch.logaddexp(ours + math.log1p(-beta), theirs + math.log(beta))
            # Of the logarithm of p: the mixture's own slopes cancel with those of normalisation, as in `_rows`.
            moved = (p * (ours - mixture)).mul_(1 - beta)
            matched = moved.sum(1) + beta * (q * (theirs - mixture)).sum(1)
        if slope_CV is not None:
            slope_CV.index_copy_(1, shared.ours, moved.mul_(above >= _LEAST).mul_(parts[0]))
    if len(unshared.ours) and len(unshared.theirs):
        ours, at = s[:, unshared.ours].exp_().sort(dim=1, descending=True)
        theirs = t[:, unshared.theirs].exp_().sort(dim=1, descending=True).values
        more = len(unshared.theirs) - len(unshared.ours)
        apart = F.pad(ours, (0, max(0, more))) - F.pad(theirs, (0, max(0, -more)))
        unmatched = apart.abs().sum(1)
        if slope_CV is not None:
            back = torch.empty_like(ours).scatter_(1, at, ours.mul_(apart[:, : len(unshared.ours)].sign_()))
            slope_CV.index_copy_(1, unshared.ours, back.mul_(parts[1]))
    return matched, unmatched, slope_CV
