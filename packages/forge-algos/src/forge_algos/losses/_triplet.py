"""Batch-all triplet loss of labelled texts: those of one label near each other."""

import torch
from torch.nn.functional import normalize

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._numeric import wide
from forge_algos.losses._terms import LossTerms

_VIOLATED = 1e-16
"""Smallest loss of a triplet that counts as one, as in sentence-transformers."""


def batch_all_triplet(texts_ND: torch.Tensor, labels: torch.Tensor, anchors: torch.Tensor, *, margin: float = 5.0) -> LossTerms:
    """Sum max(0, d(a, p) - d(a, n) + margin) over the triplets of some anchors among N texts.

    With an anchor a go all p of its label but itself, and all n of other labels; d is the Euclidean distance of embeddings of
    length 1. Divided by the number of triplets above 0 (`violations`) of all N anchors it is BatchAllTripletLoss of
    sentence-transformers. No anchor's term depends on another. Source: Hermans et al., arXiv 1703.07737, L_BA≠0.

    Args:
        texts_ND: float[N, D], embeddings; their lengths do not count.
        labels: int64[N].
        anchors: int64[A], rows of `texts_ND`.
        margin: from 0; by how much farther away another label must be. Two such embeddings are at most 2 apart.

    Returns:
        LossTerms: over the A anchors. Stats: `violations`; `pairable`, the anchors with another text of their label; and
        `correct`, those of them whose nearest other text has their label.

    Raises:
        LossError: shapes or a margin that do not fit.

    >>> terms = batch_all_triplet(torch.eye(3), torch.tensor([0, 0, 1]), torch.arange(3), margin=1.0)
    >>> round(terms.sum.item(), 4), terms.stats["violations"].item()
    (2.0, 2.0)
    """
    _check.number("margin", margin, least=0)
    if not isinstance(texts_ND, torch.Tensor) or not texts_ND.is_floating_point() or texts_ND.dim() != 2:
        raise LossError(f"texts_ND: a tensor of floats with two dimensions is wanted, not {_check.described(texts_ND)}")
    if labels.shape != texts_ND.shape[:1]:
        raise LossError(f"labels: {len(texts_ND)} are wanted, one for each text, not {_check.described(labels)}")
    texts = normalize(texts_ND.to(wide(texts_ND.dtype)), dim=1)
    labels, anchors = labels.to(texts.device), anchors.to(texts.device)
    with torch.autocast(texts.device.type, enabled=False):
        # Differences, and not products: of near texts these would keep half of the digits.
        distances_AN = torch.cdist(texts[anchors], texts, compute_mode="donot_use_mm_for_euclid_dist")
    itself = torch.arange(len(texts), device=texts.device) == anchors[:, None]
    same = (labels == labels[anchors][:, None]) & ~itself
    other = labels != labels[anchors][:, None]
    sums, violations = [], []
    # One anchor at a time: all triplets of a step would be N times as many numbers.
    for row in range(len(anchors)):
        near, far = distances_AN[row][same[row]], distances_AN[row][other[row]]
        triplets = torch.relu(near[:, None] - far + margin)
        sums.append(triplets.sum())
        violations.append((triplets.detach() > _VIOLATED).sum())
    per_sample = torch.stack(sums) if sums else texts.sum(1)[:0]
    with torch.no_grad():
        nearest = distances_AN.masked_fill(itself, torch.inf).argmin(1) if len(texts) > 1 else anchors
        pairable = same.any(1)
        right = pairable & (labels[nearest] == labels[anchors])
        stats = {
            "violations": torch.stack(violations).sum().to(per_sample) if violations else per_sample.sum(),
            "pairable": pairable.sum().to(per_sample),
            "correct": right.sum().to(per_sample),
        }
    return LossTerms(per_sample.sum(), len(anchors), stats, per_sample)
