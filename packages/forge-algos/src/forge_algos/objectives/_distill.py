"""Distillation: the divergence between a teacher's next-token distributions and the model's."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model, head, vocabulary
from forge_algos.batches._learned import RowLoader
from forge_algos.batches._packed import PackedBatch
from forge_algos.heads._head import choose_head
from forge_algos.heads._packable import require_packable
from forge_algos.isolation._guard import guard_packed
from forge_algos.losses import LossTerms
from forge_algos.objectives._tokens import LearnedTokens
from forge_algos.settings._supervised import DistillSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen(kw_only=True, eq=False)
class Distill(LearnedTokens):
    """Distillation: at each learned token the model's distribution is drawn to the teacher's.

    The divergence is the generalised JSD of GKD (arXiv 2306.13649). The labels say where, not what: the target's id is not
    read. `settings.teacher_path` is not read here: the teacher comes loaded, on the model's device, in any dtype; it is put
    into evaluation mode and gets no gradients.
    """

    settings: DistillSettings = attrs.field(validator=settings_of(DistillSettings))
    teacher: nn.Module = attrs.field(repr=False)

    @property
    def stats(self) -> tuple[str, ...]:
        """Name of the sum behind the figure."""
        return ("kl",)

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide by the number of learned tokens: `kl`, KL(teacher ‖ model) in nats, whatever β is."""
        return {"kl": sums["kl"] / count}

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundDistill":
        """Compare the two vocabularies, and choose how both heads are scored.

        Raises:
            LossError: the teacher's vocabulary is another, or the teacher is the model.
            PackedBatchError: one of the two does not keep the documents of a packed row apart.
            AdapterError: virtual tokens that one of the two cannot be given.
        """
        if causal_model(self.teacher) is causal_model(model):
            raise LossError("the teacher is the model that is trained: there would be nothing to learn; load it a second time")
        theirs, ours = _vocabulary_sizes(self.teacher), _vocabulary_sizes(model)
        if theirs != ours:
            raise LossError(
                f"the teacher, {_model_name(self.teacher)}, has a vocabulary of {_vocabulary_text(theirs)}, the model, "
                f"{_model_name(model)}, one of {_vocabulary_text(ours)}: distillation compares both over the same tokens; take "
                "a teacher with as many, or learn from its likeliest tokens alone, which `forge teach` (`top_logps`) stores"
            )
        self.teacher.eval()
        require_packable(model, device=device)
        require_packable(self.teacher, device=device)
        return _BoundDistill(self.settings, model, self.teacher, device)


class _BoundDistill:
    needs = 0

    def __init__(self, settings: DistillSettings, model: nn.Module, teacher: nn.Module, device: torch.device) -> None:
        self._settings = settings
        self.head = choose_head(model, device=device)
        self.teacher_head = choose_head(teacher, device=device)
        self._load = RowLoader(model, device)
        self._load_for_teacher = RowLoader(teacher, device)

    def measure(self, batch: PackedBatch) -> Sequence[float]:  # noqa: ARG002  the protocol's
        return []

    def __call__(self, batch: PackedBatch, totals: Sequence[float]) -> LossTerms:  # noqa: ARG002
        row, s = self._load(batch), self._settings
        # A teacher may be told otherwise where documents with images begin, and have pixels in another dtype.
        media = getattr(batch, "media_inputs", None) is not None
        theirs = self._load_for_teacher(batch).inputs if media else dict(row.inputs)
        with guard_packed(self.teacher_head.model):
            terms = self.head.distillation(
                row.inputs,
                row.rows,
                self.teacher_head,
                theirs,
                weights=row.weights,
                beta=s.beta,
                temperature=s.temperature,
            )
        return terms._replace(count=row.count)


def _vocabulary_sizes(model: nn.Module) -> tuple[int | None, int | None]:
    """Return the numbers of token ids that can go in and come out."""
    return vocabulary(model), getattr(head(model), "out_features", None)


def _vocabulary_text(widths: tuple[int | None, int | None]) -> str:
    known = [width for width in widths if width is not None]
    return " in and ".join(str(width) for width in dict.fromkeys(known)) + (" out" if len(set(known)) > 1 else "")


def _model_name(model: nn.Module) -> str:
    causal = causal_model(model)
    path = getattr(getattr(causal, "config", None), "_name_or_path", "")
    return f"{type(causal).__name__} {path}".strip()
