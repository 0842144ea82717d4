"""Training of embeddings on labelled texts: triplets of all texts of the step."""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos.batches._copies import to_device
from forge_algos.batches._packed import PackedBatch
from forge_algos.heads._embedding import Pool
from forge_algos.losses import LossTerms, batch_all_triplet
from forge_algos.objectives._tokens import LearnedTokens
from forge_algos.objectives._whole_step import BoundWholeStep, StepTexts, WholeStepLoss
from forge_algos.settings._validators import one_of


@attrs.frozen(kw_only=True, eq=False)
class LabelledTexts:
    """B texts in one row, each with the number of its label."""

    row: PackedBatch
    """The texts, a document each; their labels of tokens are not read."""
    labels: NDArray[np.int64]
    """int64[B], from 0 and below 2^53."""


def _margin(_instance: object, field: "attrs.Attribute[float]", value: float) -> None:
    if not value >= 0:
        raise ValueError(f"{field.name} must be at least 0, got {value!r}")


@attrs.frozen
class BatchAllTriplet(WholeStepLoss):
    """Mean of max(0, d(a, p) - d(a, n) + margin) above 0, over all triplets of the step.

    An anchor a, another text p of its label, a text n of another label, from all micro-batches and ranks: the loss does not
    depend on how a step is cut. It is BatchAllTripletLoss of sentence-transformers (arXiv 1703.07737) over the global batch.
    `count` is the number of texts, and the sum is the mean times it. Computed as `Contrastive` is; batches are `LabelledTexts`.

    Figure: `accuracy`, of the texts of whose label there is another one, the share whose nearest text has it too.

    >>> BatchAllTriplet(margin=1.0).unit
    'texts'
    """

    pooling: Pool = attrs.field(default="last", validator=one_of(Pool))
    margin: float = attrs.field(default=5.0, validator=_margin)
    """By how much farther away a text of another label must be; distances are at most 2."""

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "texts"

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the further sums in the terms' `stats`."""
        return ("violations", "pairable", "correct")

    def count(self, batch: LabelledTexts) -> int:
        """Count the texts of a row, without a forward."""
        return len(batch.labels)

    def samples(self, batch: LabelledTexts) -> int:
        """Count the texts of a row."""
        return len(batch.labels)

    def tokens(self, batch: LabelledTexts) -> int:
        """Count the tokens of a row."""
        return len(batch.row.input_ids)

    def idle(self) -> LabelledTexts:
        """Make a row of one text."""
        return LabelledTexts(row=LearnedTokens().idle(), labels=np.zeros(1, np.int64))

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide by the number of texts that could be right; without any there is no accuracy."""
        del count
        return {"accuracy": sums["correct"] / sums["pairable"]} if sums["pairable"] else {}

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundWholeStep:
        """Test that this model's hidden states are those of each text alone.

        Raises:
            LossError: the model has a head, or virtual tokens.
            PackedBatchError: it does not keep the documents of a row apart.
        """
        return BoundWholeStep(self, model, device)

    def facts(self, batch: LabelledTexts) -> NDArray[np.int64]:
        """Return each text's label: int64[N, 1]."""
        labels, N = np.asarray(batch.labels), len(batch.row.cu_seqlens) - 1
        if labels.shape != (N,) or labels.dtype.kind not in "iu" or (N and not 0 <= labels.min() <= labels.max() < 1 << 53):
            raise PackedBatchError(f"labels: {N} numbers from 0 are wanted, one for each text, got {labels}")
        return labels.astype(np.int64)[:, None]

    def asks(self, facts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return that every text is an anchor."""
        return np.ones(len(facts), bool)

    def terms(self, texts: StepTexts, rows: NDArray[np.int64]) -> LossTerms:
        """Compute the triplets of some anchors among all texts of the step."""
        device = texts.embeddings.device
        labels = to_device(texts.facts[:, 0], device)
        return batch_all_triplet(texts.embeddings, labels, to_device(rows, device), margin=self.margin)

    def scale(self, found: Sequence[LossTerms]) -> torch.Tensor | float:
        """Return the texts of the step over its triplets above 0: a mean of those, times the texts."""
        violations = [terms.stats["violations"] for terms in found]
        return sum(terms.count for terms in found) / torch.stack(violations).sum().clamp(min=1) if found else 1.0
