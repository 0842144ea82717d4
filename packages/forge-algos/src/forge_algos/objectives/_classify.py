"""Sequence classification: a class, or several labels, for each document of a packed row."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos.batches._copies import to_device
from forge_algos.batches._learned import RowLoader
from forge_algos.batches._packed import PackedBatch, require
from forge_algos.heads._packable import require_packable
from forge_algos.heads._scalar_head import choose_scalar_head
from forge_algos.losses import LossTerms, classification
from forge_algos.objectives._tokens import LearnedTokens


@attrs.frozen(kw_only=True, eq=False)
class ClassifyBatch:
    """B documents in one row, and what each of them is."""

    row: PackedBatch
    """The documents; their labels of tokens are not read."""
    targets: NDArray[Any]
    """int64[B], the class of each document from 0; or float32[B, C] from 0 to 1, which of C labels it has."""


def _count(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{field.name} must be a whole number, got {value!r} ({type(value).__name__})")
    if value < 1:
        raise ValueError(f"{field.name} must be at least 1, got {value}")


@attrs.frozen
class Classify:
    """Sequence classification: transformers' own losses of one class, or of several labels.

    The model is an AutoModelForSequenceClassification with as many labels, whose layer `score` is read at each document's last
    token. One forward a row; batches are `ClassifyBatch`. No document's term depends on another, and accuracy and F1 come from
    sums, so that nothing depends on how a step or an evaluation is cut.

    >>> Classify(labels=3).stats[:3]
    ('correct', 'hits_0', 'hits_1')
    """

    labels: int = attrs.field(validator=_count)
    """C, the model's `num_labels`."""
    multi_label: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether a document may have several labels, or none: targets are float32[B, C] then, and each label is asked by
    itself."""

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "samples"

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the further sums in the terms' `stats`."""
        return ("correct", *(f"{name}_{c}" for name in ("hits", "predicted", "actual") for c in range(self.labels)))

    def count(self, batch: ClassifyBatch) -> int:
        """Count the documents of a row, without a forward."""
        require(batch, "row", "a ClassifyBatch")
        return max(0, len(batch.row.cu_seqlens) - 1)

    def samples(self, batch: ClassifyBatch) -> int:
        """Count the documents of a row."""
        return self.count(batch)

    def tokens(self, batch: ClassifyBatch) -> int:
        """Count the tokens of a row."""
        return len(batch.row.input_ids)

    def idle(self) -> ClassifyBatch:
        """Make a row of one document with two tokens."""
        targets = np.zeros((1, self.labels), np.float32) if self.multi_label else np.zeros(1, np.int64)
        return ClassifyBatch(row=LearnedTokens().idle(), targets=targets)

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide `accuracy` by the number of samples, and take the mean of the classes' F1 (macro).

        Of several labels a sample is right if all of its labels are. A class that nothing is of, and that nothing was taken
        for, has no F1 and is left out.
        """
        of = [(sums[f"hits_{c}"], sums[f"predicted_{c}"] + sums[f"actual_{c}"]) for c in range(self.labels)]
        known = [2 * hits / both for hits, both in of if both]
        return {"accuracy": sums["correct"] / count, "f1": sum(known) / len(known) if known else 0.0}

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundClassify":
        """Test that this model gives as many numbers, and choose how they are read.

        Raises:
            LossError: the model is no sequence classifier with as many labels.
            PackedBatchError: it does not keep the documents of a row apart.
            AdapterError: virtual tokens that the model cannot be given.
        """
        return _BoundClassify(self, model, device)


class _BoundClassify:
    needs = 0

    def __init__(self, objective: Classify, model: nn.Module, device: torch.device) -> None:
        require_packable(model, device=device)
        self._head = choose_scalar_head(model, device=device, labels=objective.labels)
        self._load = RowLoader(model, device)
        self._objective, self._device = objective, device

    def measure(self, batch: ClassifyBatch) -> Sequence[float]:
        del batch
        return []

    def __call__(self, batch: ClassifyBatch, totals: Sequence[float]) -> LossTerms:
        del totals
        targets = self._targets(batch)
        ends = to_device(np.asarray(batch.row.cu_seqlens)[1:] - 1, self._device, torch.int64)
        return classification(self._head.logits(self._load(batch.row).inputs, ends), targets)

    def _targets(self, batch: ClassifyBatch) -> torch.Tensor:
        """Return the targets on the device, or raise PackedBatchError where they do not fit."""
        wanted, found = self._objective, np.asarray(batch.targets)
        B = wanted.count(batch)
        shape = (B, wanted.labels) if wanted.multi_label else (B,)
        kinds = "f" if wanted.multi_label else "iu"
        if found.shape != shape or found.dtype.kind not in kinds:
            what = "numbers from 0 to 1 in float32" if wanted.multi_label else "classes in int64"
            raise PackedBatchError(
                f"targets: {what} of the shape {list(shape)} are wanted for {B} documents and {wanted.labels} labels, not "
                f"{found.dtype}{list(found.shape)}"
            )
        least, most = (found.min(), found.max()) if found.size else (0, 0)
        limit = 1 if wanted.multi_label else wanted.labels - 1
        if not (least >= 0 and most <= limit):
            raise PackedBatchError(f"targets: numbers from 0 to {limit} are wanted, found {least} to {most}")
        return to_device(found, self._device, torch.float32 if wanted.multi_label else torch.int64)
