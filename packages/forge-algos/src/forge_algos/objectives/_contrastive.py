"""Contrastive training of embeddings: pairs, with all other texts as negatives."""

import hashlib
from collections.abc import Mapping, Sequence
from itertools import pairwise

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos.batches._copies import to_device
from forge_algos.batches._packed import PackedBatch, require
from forge_algos.heads._embedding import Pool
from forge_algos.losses import LossTerms, contrastive
from forge_algos.objectives._tokens import LearnedTokens
from forge_algos.objectives._whole_step import BoundWholeStep, StepTexts, WholeStepLoss
from forge_algos.settings._validators import one_of

_POSITIVE, _TEXT = 0, 1


@attrs.frozen(kw_only=True, eq=False)
class ContrastiveBatch:
    """B queries in one row, with their positives and any hard negatives."""

    row: PackedBatch
    """All texts, a document each; their labels of tokens are not read."""
    queries: NDArray[np.int64]
    """int64[B], the documents that are queries. All others are candidates."""
    positives: NDArray[np.int64]
    """int64[B], the document that is each query's positive."""
    media: Sequence[bytes] | None = None
    """Of each document what tells its images from other ones for which the same tokens stand; None without any."""


def _temperature(_instance: object, field: "attrs.Attribute[float]", value: float) -> None:
    if not value > 0:
        raise ValueError(f"{field.name} must be above 0, got {value!r}")


@attrs.frozen
class Contrastive(WholeStepLoss):
    """InfoNCE of each query's positive among all candidates of the step (arXiv 1807.03748).

    The candidates are the positives and hard negatives of all queries of the global batch, of every micro-batch and rank, so
    the loss does not depend on how a step is cut, and a larger `effective_batch_size` gives each query more negatives. Where a
    rank has several micro-batches in a step, each is run twice (GradCache, arXiv 2101.06983), the second time with gradients
    and the dropout of the first. Divided by the count it is MultipleNegativesRankingLoss of sentence-transformers with
    scale 1 / temperature over that batch. Batches are `ContrastiveBatch`; the model is an AutoModel, without a head.

    Figures: `accuracy`, the share of queries whose positive is nearer than all other candidates, and `mrr`, the mean of
    1 / its place among them. In an evaluation the candidates are those of all its batches.

    >>> Contrastive(pooling="mean").stats
    ('correct', 'reciprocal_rank')
    """

    pooling: Pool = attrs.field(default="last", validator=one_of(Pool))
    temperature: float = attrs.field(default=0.05, validator=_temperature)
    """Divides the cosines; above 0."""
    exclude_same_text: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether a candidate with the tokens (and images) of a query's positive is no negative of that query."""

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "queries"

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the further sums in the terms' `stats`."""
        return ("correct", "reciprocal_rank")

    def count(self, batch: ContrastiveBatch) -> int:
        """Count the queries of a row, without a forward."""
        require(batch, "queries", "a ContrastiveBatch")
        return len(batch.queries)

    def samples(self, batch: ContrastiveBatch) -> int:
        """Count the queries of a row."""
        return len(batch.queries)

    def tokens(self, batch: ContrastiveBatch) -> int:
        """Count the tokens of a row."""
        return len(batch.row.input_ids)

    def idle(self) -> ContrastiveBatch:
        """Make a row of one text that no query asks for."""
        return ContrastiveBatch(row=LearnedTokens().idle(), queries=np.zeros(0, np.int64), positives=np.zeros(0, np.int64))

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide both by the number of queries."""
        return {"accuracy": sums["correct"] / count, "mrr": sums["reciprocal_rank"] / count}

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundWholeStep:
        """Test that this model's hidden states are those of each text alone.

        Raises:
            LossError: the model has a head, or virtual tokens.
            PackedBatchError: it does not keep the documents of a row apart.
        """
        return BoundWholeStep(self, model, device)

    def facts(self, batch: ContrastiveBatch) -> NDArray[np.int64]:
        """Return int64[N, 2]: how far behind a query its positive stands, and the text's number.

        The first is 0 for a candidate; the second is a hash of the tokens and images, or 0 where none is needed.
        """
        queries, positives = (np.asarray(given) for given in (batch.queries, batch.positives))
        N = len(batch.row.cu_seqlens) - 1
        whole = all(
            given.dtype.kind in "iu" and given.shape == queries.shape and given.ndim == 1 for given in (queries, positives)
        )
        if not whole or len(set(queries.tolist())) < len(queries):
            raise PackedBatchError(
                f"queries and positives: different documents of the row are wanted, got {queries} and {positives}"
            )
        for given in (queries, positives):
            if len(given) and not 0 <= given.min() <= given.max() < N:
                raise PackedBatchError(f"queries and positives: documents 0 to {N - 1} of the row are wanted, got {given}")
        if np.isin(positives, queries).any():
            raise PackedBatchError("positives: a query's positive is a candidate, and no query itself")
        found = np.zeros((N, 2), np.int64)
        found[queries, _POSITIVE] = positives - queries
        if self.exclude_same_text:
            ids, starts = np.asarray(batch.row.input_ids, np.int64), np.asarray(batch.row.cu_seqlens).tolist()
            media = batch.media or [b""] * N
            texts = zip(pairwise(starts), media, strict=True)
            found[:, _TEXT] = [_number_of(ids[begin:end].tobytes() + own) for (begin, end), own in texts]
        return found

    def asks(self, facts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which texts are queries."""
        return facts[:, _POSITIVE] != 0

    def terms(self, texts: StepTexts, rows: NDArray[np.int64]) -> LossTerms:
        """Compute the terms of some queries among all candidates of the step."""
        facts, device = texts.facts, texts.embeddings.device
        candidates = np.flatnonzero(~self.asks(facts))
        places = np.zeros(len(facts), np.int64)
        places[candidates] = np.arange(len(candidates))
        positives = rows + facts[rows, _POSITIVE]
        excluded = None
        if self.exclude_same_text:
            excluded = torch.tensor(facts[candidates, _TEXT] == facts[positives, _TEXT][:, None], device=device)
        return contrastive(
            texts.embeddings[to_device(rows, device)],
            texts.embeddings[to_device(candidates, device)],
            torch.tensor(places[positives]),
            temperature=self.temperature,
            excluded=excluded,
        )


def _number_of(text: bytes) -> int:
    # What an int64 holds, whatever its sign.
    return int.from_bytes(hashlib.blake2b(text, digest_size=6).digest())
