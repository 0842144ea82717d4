"""Logits of two models with two tokenizers → the distance between what they predict.

A span is text that both tokenizers cut at its two ends: one token of each, or several of either. GOLD's definition, over the
universal logit distillation (ULD) of arXiv 2402.12030.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._numeric import wide
from forge_algos.losses._terms import LossTerms, summed

LEAST_PROBABILITY = 1e-8
"""Probabilities below are taken for it where they are multiplied or compared by their logarithm, as TRL does."""


class SharedTokens(NamedTuple):
    """Tokens that two vocabularies have in common, each once."""

    ours: torch.Tensor
    """int64[n]: their ids in the student's."""
    theirs: torch.Tensor
    """int64[n]: the id of each in the teacher's."""


def no_shared_tokens(device: torch.device | None = None) -> SharedTokens:
    """Return none, with which the loss is ULD's: sorted probabilities alone."""
    return SharedTokens(*(torch.zeros(0, dtype=torch.int64, device=device) for _ in range(2)))


def aligned_distillation(
    student_logits: torch.Tensor,
    teacher_logits: torch.Tensor,
    *,
    shared: SharedTokens | None = None,
    student_before: torch.Tensor | None = None,
    teacher_before: torch.Tensor | None = None,
    beta: float = 0.5,
    temperature: float = 1.0,
    weights: tuple[float, float] | None = None,
) -> LossTerms:
    """Sum the distance between two models over G spans of the same text (GOLD's hybrid ULD).

    A span's distribution is that over its last token times the probability of its tokens before that, by the chain rule; it
    sums to 1 for a span of one token. On tokens that both vocabularies share it is compared by the generalised JSD of
    `losses.distillation`, which is not normalised here; on the others by the L1 distance between both sides' probabilities,
    sorted. Without shared tokens all are sorted: ULD, arXiv 2402.12030.

    Args:
        student_logits: float[G, V], which predict the last token of each span; finite.
        teacher_logits: float[G, W], likewise; no gradient reaches them.
        shared: tokens in common; None for none.
        student_before: float[G], log-probability of the span's tokens before the last, 0 where there are none; None: all 0.
        teacher_before: likewise, of the teacher's tokens.
        beta: from 0 (forward KL) to 1 (reverse KL), of shared tokens.
        temperature: above 0; divides both logits.
        weights: of the two parts; None: the share of the teacher's vocabulary that is shared, and the rest.

    Returns:
        LossTerms: over the G spans. Stats: `matched`, the JSD, and `unmatched`, the L1 distance, before their weights.

    Raises:
        LossError: shapes that disagree, or a number out of range.

    >>> student, teacher = torch.tensor([[0.5, 0.3, 0.2]]).log(), torch.tensor([[0.1, 0.6, 0.3]]).log()
    >>> round(aligned_distillation(student, teacher).sum.item(), 4)  # |0.5-0.6| + |0.3-0.3| + |0.2-0.1|
    0.2
    >>> same = SharedTokens(torch.tensor([0]), torch.tensor([1]))
    >>> round(aligned_distillation(student, teacher, shared=same, weights=(0.0, 1.0)).sum.item(), 4)  # 0.3, 0.2; 0.3, 0.1
    0.1
    """
    _check.number("beta", beta, least=0)
    _check.number("temperature", temperature, above=0)
    if beta > 1:
        raise LossError(f"beta: a number from 0 to 1 is wanted, not {beta!r}")
    for name, logits in (("student_logits", student_logits), ("teacher_logits", teacher_logits)):
        if not isinstance(logits, torch.Tensor) or not logits.is_floating_point() or logits.dim() != 2:
            raise LossError(f"{name}: a tensor of floats [spans, vocabulary] is wanted, not {_check.described(logits)}")
    if len(student_logits) != len(teacher_logits):
        raise LossError(
            f"{len(student_logits)} spans of student_logits and {len(teacher_logits)} of teacher_logits: both are of the same"
        )
    dtype = torch.promote_types(wide(student_logits.dtype), teacher_logits.dtype)
    s = _merged(student_logits.to(dtype), temperature, student_before)
    t = _merged(teacher_logits.detach().to(dtype), temperature, teacher_before)
    shared = shared or no_shared_tokens(s.device)
    least = torch.tensor(LEAST_PROBABILITY, dtype=dtype).log().item()
    ours, theirs = s[:, shared.ours].clamp_min(least), t[:, shared.theirs].clamp_min(least)
    mixture = torch.log((1 - beta) * ours.exp() + beta * theirs.exp())
    if beta == 0:
        matched = _kl(theirs, ours)
    elif beta == 1:
        matched = _kl(ours, theirs)
    else:
        matched = beta * _kl(theirs, mixture) + (1 - beta) * _kl(ours, mixture)
    rest = [
        logits[:, others(ids, logits.shape[1])].exp().sort(dim=1, descending=True).values
        for logits, ids in ((s, shared.ours), (t, shared.theirs))
    ]
    unmatched = torch.zeros(len(s), dtype=dtype, device=s.device)
    if all(part.shape[1] for part in rest):
        most = max(part.shape[1] for part in rest)
        a, b = (F.pad(part, (0, most - part.shape[1])) for part in rest)
        unmatched = (a - b).abs().sum(1)
    of_matched, of_unmatched = weights or adaptive_weights(shared, t.shape[1])
    return summed(of_matched * matched + of_unmatched * unmatched, {"matched": matched, "unmatched": unmatched})


def adaptive_weights(shared: SharedTokens, vocabulary: int) -> tuple[float, float]:
    """Return the share of a teacher's `vocabulary` ids that are shared, and the rest."""
    share = len(shared.theirs) / max(1, vocabulary)
    return share, 1 - share


def others(ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Return the ids below `vocabulary` that are not among `ids`: int64[vocabulary - n]."""
    alone = torch.ones(vocabulary, dtype=torch.bool, device=ids.device)
    alone[ids] = False
    return alone.nonzero()[:, 0]


def _merged(logits: torch.Tensor, temperature: float, before: torch.Tensor | None) -> torch.Tensor:
    found = (logits / temperature).log_softmax(-1)
    return found if before is None else found + before.to(found.dtype)[:, None]


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(-1)
