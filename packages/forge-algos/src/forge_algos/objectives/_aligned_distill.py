"""Distillation across tokenizers: the distance between two predictions of the same text."""

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model, head, vocabulary
from forge_algos.batches._aligned import AlignedBatch, check_aligned, idle_aligned, span_positions, span_weights
from forge_algos.batches._copies import to_device
from forge_algos.batches._learned import RowLoader, sample_count, token_count
from forge_algos.heads._head import choose_head
from forge_algos.heads._packable import require_packable
from forge_algos.isolation._guard import guard_packed
from forge_algos.losses import LossTerms
from forge_algos.losses.distillation._aligned import SharedTokens, adaptive_weights
from forge_algos.losses.distillation._aligned_rows import SpanRows, Unshared
from forge_algos.settings._supervised import DistillSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen(kw_only=True, eq=False)
class AlignedDistill:
    """Distillation from a teacher with another tokenizer, over spans that both cut alike.

    `losses.aligned_distillation` is the term of a span: GOLD's hybrid of a JSD on the tokens that both vocabularies have and of
    ULD (arXiv 2402.12030) on the others. `shared` are the former, with `settings.loss="uld"` none. The teacher comes loaded, as
    for `Distill`; batches are `AlignedBatch`.
    """

    settings: DistillSettings = attrs.field(validator=settings_of(DistillSettings))
    teacher: nn.Module = attrs.field(repr=False)
    shared: tuple[NDArray[np.int64], NDArray[np.int64]] = attrs.field(repr=False)
    """int64[n] twice: ids of the student's tokens that the teacher has too, and the teacher's id of each."""

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "spans"

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the sums behind the figures."""
        return ("matched", "unmatched")

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide the JSD of shared tokens, and the L1 distance of the others, by the spans.

        Both are before their weights.
        """
        return {name: sums[name] / count for name in self.stats}

    def count(self, batch: AlignedBatch) -> float:
        """Count the spans, or add up their weights."""
        if not len(batch.row.input_ids):
            return 0
        check_aligned(batch)
        weights = span_weights(batch)
        return len(batch.spans) if weights is None else float(weights.sum(dtype=np.float64))

    def samples(self, batch: AlignedBatch) -> int:
        """Count the documents of the student's row."""
        return sample_count(batch.row)

    def tokens(self, batch: AlignedBatch) -> int:
        """Count the tokens of both rows."""
        return token_count(batch.row) + token_count(batch.teacher)

    def idle(self) -> AlignedBatch:
        """Make a span of one token."""
        return idle_aligned()

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundAlignedDistill":
        """Choose how both heads are scored, and find the tokens that are not shared.

        Raises:
            LossError: the teacher is the model, or a shared token is outside of a vocabulary.
            PackedBatchError: one of the two does not keep the documents of a packed row apart.
        """
        if causal_model(self.teacher) is causal_model(model):
            raise LossError("the teacher is the model that is trained: there would be nothing to learn; load it a second time")
        self.teacher.eval()
        require_packable(model, device=device)
        require_packable(self.teacher, device=device)
        return _BoundAlignedDistill(self, model, device)


class _BoundAlignedDistill:
    needs = 0

    def __init__(self, objective: AlignedDistill, model: nn.Module, device: torch.device) -> None:
        s, models = objective.settings, (model, objective.teacher)
        self._settings, self._device = s, device
        self.head, self.teacher_head = (choose_head(each, device=device) for each in models)
        self._load, self._load_for_teacher = (RowLoader(each, device) for each in models)
        ids = [np.asarray(each, np.int64) for each in objective.shared]
        widths = [getattr(head(each), "out_features", None) or vocabulary(each) or 0 for each in models]
        for name, own, width in zip(("model", "teacher"), ids, widths, strict=True):
            if len(own) != len(ids[0]) or len(np.unique(own)) != len(own) or (own >= width).any() or (own < 0).any():
                raise LossError(f"shared: the {name}'s ids must be {len(ids[0])} different ones below {width}")
        # Found here, by numpy: how many there are must be known where tensors have no values (the memory plan).
        rest = [np.setdiff1d(np.arange(width), own) for own, width in zip(ids, widths, strict=True)]
        self._shared = SharedTokens(*(to_device(each, device) for each in ids))
        self._unshared = Unshared(*(to_device(each, device) for each in rest))
        self._parts = adaptive_weights(self._shared, widths[1])
        if s.matched_weight is not None and s.unmatched_weight is not None:
            self._parts = s.matched_weight, s.unmatched_weight

    def measure(self, batch: AlignedBatch) -> Sequence[float]:  # noqa: ARG002  the protocol's
        return []

    def __call__(self, batch: AlignedBatch, totals: Sequence[float] = ()) -> LossTerms:  # noqa: ARG002
        check_aligned(batch)
        row, theirs = self._load(batch.row), self._load_for_teacher(batch.teacher)
        weights = span_weights(batch)
        with guard_packed(self.teacher_head.model):
            terms = self.head.aligned_distillation(
                row.inputs,
                self._rows(batch.row, batch.spans[:, :2]),
                self.teacher_head,
                theirs.inputs,
                self._rows(batch.teacher, batch.spans[:, 2:]),
                shared=self._shared,
                unshared=self._unshared,
                parts=self._parts,
                beta=self._settings.beta,
                temperature=self._settings.temperature,
                weights=None if weights is None else to_device(weights, self._device, torch.float32),
            )
        return terms if weights is None else terms._replace(count=float(weights.sum(dtype=np.float64)))

    def _rows(self, row: object, spans: NDArray[np.int64]) -> SpanRows:
        ids: NDArray[np.int64] = np.asarray(getattr(row, "input_ids"))  # noqa: B009 - a protocol's
        return SpanRows(*(to_device(each, self._device) for each in span_positions(ids, spans)))
