"""Loss of text embeddings (InfoNCE): each query's own text among the others of the batch."""

import torch
from torch.nn.functional import cross_entropy, normalize

from forge_algos._errors import LossError
from forge_algos.losses import _check
from forge_algos.losses._numeric import wide
from forge_algos.losses._terms import LossTerms


def contrastive(
    queries_BD: torch.Tensor,
    candidates_ND: torch.Tensor,
    positives: torch.Tensor,
    *,
    temperature: float = 0.05,
    excluded: torch.Tensor | None = None,
) -> LossTerms:
    """Sum InfoNCE of B queries over N candidates of which one is each query's positive.

    A query's term is -log softmax(cos(q, c) / temperature) at its positive. All candidates but its own are its negatives: the
    other queries' positives and any hard negatives, in any order. Divided by the count it is MultipleNegativesRankingLoss of
    sentence-transformers, whose `scale` is 1 / temperature. As there, a candidate with the same text as the positive is a
    negative all the same, unless it is `excluded`. Source: van den Oord et al., arXiv 1807.03748.

    No query's term depends on another query, so the sum over any division of the queries is that of all of them, as long as
    each part is given all candidates. Gradients run through queries and candidates.

    Args:
        queries_BD: float[B, D], embeddings; their lengths do not count.
        candidates_ND: float[N, D], embeddings; their lengths do not count.
        positives: int64[B], the row of each query's positive in `candidates_ND`; several queries may have the same one.
        temperature: above 0; divides the cosines.
        excluded: bool[B, N], candidates that are no negatives of a query, and are left out of its term and its place; none by
            default. A positive cannot be.

    Returns:
        LossTerms: over the B queries, in nats. Stats: `correct`, queries whose positive is nearer than every other candidate,
        and `reciprocal_rank`, 1 / the positive's place among them by nearness. Of equally near candidates the positive is
        the last one: embeddings that are all alike find nothing.

    Raises:
        LossError: shapes, rows or a temperature that do not fit.

    >>> terms = contrastive(torch.eye(2), torch.eye(2), torch.tensor([0, 1]), temperature=1.0)
    >>> round(terms.sum.item(), 4), terms.count, terms.stats["correct"].item()
    (0.6265, 2, 2.0)
    """
    _check.number("temperature", temperature, above=0)
    for name, tensor in (("queries_BD", queries_BD), ("candidates_ND", candidates_ND)):
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.dim() != 2:
            raise LossError(f"{name}: a tensor of floats with two dimensions is wanted, not {_check.described(tensor)}")
    if queries_BD.shape[1] != candidates_ND.shape[1]:
        raise LossError(
            f"queries_BD and candidates_ND: embeddings of one width are wanted, not {queries_BD.shape[1]} and "
            f"{candidates_ND.shape[1]}"
        )
    B, N = len(queries_BD), len(candidates_ND)
    whole = isinstance(positives, torch.Tensor) and positives.dtype in (torch.int32, torch.int64)
    if not whole or positives.shape != (B,):
        raise LossError(
            f"positives: integers of the shape {[B]} are wanted, one for each query, not {_check.described(positives)}"
        )
    if B and not 0 <= int(positives.min()) <= int(positives.max()) < N:
        raise LossError(
            f"positives: rows of the {N} candidates are wanted, found {int(positives.min())} to {int(positives.max())}"
        )
    if excluded is not None and (excluded.dtype != torch.bool or excluded.shape != (B, N)):
        raise LossError(f"excluded: booleans of the shape {[B, N]} are wanted, not {_check.described(excluded)}")
    dtype = torch.promote_types(wide(queries_BD.dtype), wide(candidates_ND.dtype))
    queries, candidates = (normalize(given.to(dtype), dim=1) for given in (queries_BD, candidates_ND))
    positives = positives.to(device=queries.device, dtype=torch.int64, non_blocking=True)
    # Autocast would take the cosines in 16 bits, which the temperature then multiplies.
    with torch.autocast(queries.device.type, enabled=False):
        scores_BN = queries @ candidates.T / temperature
    if excluded is not None:
        own_BN = torch.arange(N, device=positives.device) == positives[:, None]
        scores_BN = scores_BN.masked_fill(excluded.to(queries.device) & ~own_BN, -torch.inf)
    per_sample = cross_entropy(scores_BN, positives, reduction="none")
    with torch.no_grad():
        own = scores_BN.gather(1, positives[:, None])
        # A score that is no number is below none, and so the last one.
        rank = N - (scores_BN < own).sum(1)
        stats = {"correct": (rank == 1).sum().to(per_sample), "reciprocal_rank": (1 / rank).to(per_sample).sum()}
    return LossTerms(per_sample.sum(), B, stats, per_sample)
