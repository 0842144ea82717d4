"""Self-distillation: on its own samples a model learns from itself, shown the demonstration."""

from collections.abc import Mapping, Sequence

import attrs
import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model, mode
from forge_algos.batches._copies import to_device
from forge_algos.batches._groups import group_tensors
from forge_algos.batches._learned import token_count
from forge_algos.batches._taught import TaughtBatch, check_taught, idle_taught
from forge_algos.heads._completions import GroupModel
from forge_algos.heads._head import choose_head
from forge_algos.isolation._guard import guard_packed
from forge_algos.losses import LossTerms
from forge_algos.objectives._objective import Weights
from forge_algos.settings._self_distill import SDFTSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen(kw_only=True, eq=False)
class SelfDistill:
    """Self-distillation (SDFT, arXiv 2601.19897) on the student's own samples y.

    The loss is Σ KL(student(·|x, y<t) ‖ teacher(·|x, c, y<t)). The teacher is the same model under other weights, or a frozen
    copy, and has the demonstration c before it; the divergence at a token is over the whole vocabulary, and no gradient runs
    through the sampling or the teacher. `settings.beta` chooses the divergence, as in `Distill`.
    """

    settings: SDFTSettings = attrs.field(validator=settings_of(SDFTSettings))
    teacher: nn.Module | Weights = attrs.field(repr=False)

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "tokens"

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the sums behind the figures."""
        return ("kl", "completions", "tokens", "finished")

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide each sum by the number of its summands.

        `kl` is KL(teacher ‖ student) in nats a token, whatever β; `length` and `cut_off` are means over completions.
        """
        completions = max(1.0, sums["completions"])
        return {
            "kl": sums["kl"] / count,
            "length": sums["tokens"] / completions,
            "cut_off": 1 - sums["finished"] / completions,
        }

    def count(self, batch: TaughtBatch) -> int:
        """Count the tokens that are learned from, without a forward."""
        if not len(batch.groups.lengths):
            return 0
        check_taught(batch)
        return len(batch.kept)

    def samples(self, batch: TaughtBatch) -> int:
        """Count the completions of a batch."""
        return len(batch.groups.lengths)

    def tokens(self, batch: TaughtBatch) -> int:
        """Count the tokens of both rows, prompts included.
        What groups share counts for each of them.
        """
        return token_count(batch.groups) + token_count(batch.teacher)

    def idle(self) -> TaughtBatch:
        """Make a batch of one made-up completion."""
        return idle_taught()

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundSelfDistill":
        """Choose how the heads are scored.

        Raises:
            LossError: the teacher is the model itself.
            PackedBatchError: the model or its teacher does not keep a row's documents apart.
        """
        return _BoundSelfDistill(self, model, device)


class _BoundSelfDistill:
    needs = 0

    def __init__(self, objective: SelfDistill, model: nn.Module, device: torch.device) -> None:
        self._settings, self._device = objective.settings, device
        self._student = GroupModel(model, device=device)
        self._head = choose_head(model, device=device)
        self._weights: Weights | None = None
        self._teacher, self._teacher_head = self._student, self._head
        if not isinstance(objective.teacher, nn.Module):
            self._weights = objective.teacher
            return
        if causal_model(objective.teacher) is causal_model(model):
            raise LossError("the teacher is the model that is trained, in whose place its weights are exchanged; load a copy")
        objective.teacher.eval()
        self._teacher = GroupModel(objective.teacher, device=device)
        self._teacher_head = choose_head(objective.teacher, device=device)

    def measure(self, batch: TaughtBatch) -> Sequence[float]:  # noqa: ARG002  the protocol's
        return []

    def __call__(self, batch: TaughtBatch, totals: Sequence[float] = ()) -> LossTerms:  # noqa: ARG002
        check_taught(batch)
        s, model = self._settings, self._student.model
        kept = to_device(batch.kept, self._device)
        inputs, asked = self._student.inputs(batch.groups), self._teacher.inputs(batch.teacher)
        rows, theirs = (group_tensors(row, self._device)[0][kept] for row in (batch.groups, batch.teacher))
        if self._weights is None:
            with guard_packed(self._teacher.model):
                terms = self._head.distillation(
                    inputs, rows, self._teacher_head, asked, beta=s.beta, temperature=s.temperature, teacher_rows=theirs
                )
        else:
            with mode(model, training=False), self._weights(model):
                held = self._head.hold(asked, theirs, temperature=s.temperature)
            terms = self._head.distillation(inputs, rows, held, beta=s.beta, temperature=s.temperature)
        numbers = {
            "completions": len(batch.groups.lengths),
            "tokens": len(batch.groups.rows),
            "finished": int(batch.finished.sum()),
        }
        stats = {name: terms.sum.new_tensor(float(value)) for name, value in numbers.items()}
        return terms._replace(stats={"kl": terms.stats["kl"], **stats})
