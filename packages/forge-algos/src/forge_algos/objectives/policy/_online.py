"""Base class of the online methods: one forward, the clipped ratio, and the figures."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
import torch
from torch import nn

from forge_algos.batches._groups import group_tensors
from forge_algos.batches._learned import token_count
from forge_algos.batches._online import OnlineBatch, check_online, idle_online
from forge_algos.batches._packed import require
from forge_algos.heads._completions import Completions, to_float32
from forge_algos.losses import LossTerms, kl, policy_gradient
from forge_algos.objectives._mean import require_totals
from forge_algos.objectives._objective import FollowsSteps
from forge_algos.objectives.policy._kl_control import KLControl
from forge_algos.settings._online import OnlineSettings
from forge_algos.settings._validators import check_settings

S = TypeVar("S", bound=OnlineSettings)


class OnlineObjective(FollowsSteps, Generic[S]):
    """Base class of an online method: the clipped ratio, weighed by the batch's advantages.

    A subclass overrides `loss_options` or `terms` where its loss has more than the clipped ratio. What couples completions is
    settled when the rollout is made, before anything is cut.
    """

    further: ClassVar[tuple[str, ...]] = ()
    """Further stats of this method, sums over its terms."""
    wanted: ClassVar[tuple[str, ...]] = ()
    """Arrays of the batch that this method needs beside those that all need."""

    def __init__(self, settings: S, kind: type[S]) -> None:
        """Take the method's settings, which are of `kind`."""
        check_settings(kind, settings)
        self.settings = settings
        self._kl = None if settings.kl_target is None else KLControl(settings)

    @property
    def kl_weight(self) -> float:
        """`kl_weight`, or what it has become with `kl_target`: that of the next rollout."""
        return self.settings.kl_weight if self._kl is None else self._kl.weight

    def after_rollout(self, kl: float, completions: int) -> None:
        """Move the weight of the KL, where it follows a target.

        Args:
            kl: mean of the completions' KL, in nats a token, under the weights that sampled.
            completions: of the rollout, that were measured.
        """
        if self._kl is not None and completions:
            self._kl.follow(kl, completions)

    def after_step(self, figures: Mapping[str, float]) -> None:
        """Follow nothing: a rollout moves the weight of the KL."""
        del figures

    def state(self) -> dict[str, float]:
        """Return the weight of the KL, where it follows a target."""
        return {} if self._kl is None else self._kl.state()

    def resume(self, state: Mapping[str, float]) -> None:
        """Go on with that weight."""
        if self._kl is not None:
            self._kl.resume(state)

    @property
    def kind(self) -> str:
        """Row of `POLICY_KINDS`: what the ratio is formed of, and what a term is."""
        return self.settings.kind

    @property
    def unit(self) -> str:
        """Unit of `count`: tokens or completions, from the kind's row."""
        return self.settings.policy.unit

    @property
    def entropy_weight(self) -> float:
        """Weight of the policy's mean entropy a token, which is subtracted from the loss."""
        return 0.0

    @property
    def learns_entropy(self) -> bool:
        """Whether that may be above 0."""
        return False

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the sums over completions, tokens and terms.
        `completions` and `rewards` are over completions, `tokens`, `entropy` and `kl` over tokens, all others over terms.
        """
        return ("completions", "rewards", "tokens", "entropy", "kl", "clipped", "ratio", "approx_kl", *self.further)

    def count(self, batch: OnlineBatch) -> int:
        """Count the completions or tokens of a batch, whichever `unit` names, without a forward."""
        require(batch, "groups", "an OnlineBatch")
        if not len(batch.groups.lengths):
            return 0
        check_online(batch)
        return len(batch.groups.lengths) + batch.masked if self.unit == "completions" else len(batch.groups.rows)

    def samples(self, batch: OnlineBatch) -> int:
        """Count the completions of a batch."""
        return len(batch.groups.lengths)

    def tokens(self, batch: OnlineBatch) -> int:
        """Count the tokens of the row, prompts included.
        What groups share counts for each of them.
        """
        return token_count(batch.groups)

    def idle(self) -> OnlineBatch:
        """Make a batch of two made-up completions."""
        return idle_online()

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide each sum of `stats` by the number of its summands.

        Means over completions are `reward` and `length`; over tokens `entropy` (of the policy) and `kl` (k3, from the
        reference, where there is one); over terms `clipped` (where the clip binds), `ratio` (to the policy that sampled) and
        `approx_kl` (k3, from it).
        """
        completions, tokens = max(1.0, sums["completions"]), max(1.0, sums["tokens"])
        found = {
            "reward": sums["rewards"] / completions,
            "length": sums["tokens"] / completions,
            "entropy": sums["entropy"] / tokens,
            **{name: sums[name] / count for name in ("clipped", "ratio", "approx_kl", *self.further)},
        }
        return found | ({"kl": sums["kl"] / tokens} if self.settings.kl_weight else {})

    def bind(self, model: nn.Module, *, device: torch.device) -> "BoundOnline":
        """Choose how this model's head is scored.

        Raises:
            PackedBatchError: the model does not keep a row's documents apart.
            AdapterError: virtual tokens that the model cannot be given.
        """
        return BoundOnline(self, model, device=device)

    def loss_options(self, batch: OnlineBatch, device: torch.device) -> dict[str, Any]:
        """Return the arguments of `losses.policy_gradient` from the settings and the batch."""
        del batch, device
        return {"clip": self.settings.clip, "clip_high": self.settings.clip_high}

    def terms(self, bound: "BoundOnline", batch: OnlineBatch) -> LossTerms:
        """Compute the batch's terms in one forward."""
        logps, entropy, _ = bound.forward(batch)
        return bound.policy(batch, logps, entropy)


class BoundOnline:
    """An `OnlineObjective` on one model: one forward a batch, at the sampling temperature."""

    def __init__(self, objective: OnlineObjective[Any], model: nn.Module, *, device: torch.device) -> None:
        """Choose how the head is scored."""
        self.model = model
        self.device = device
        self._completions = Completions(model, device=device)
        self._objective = objective
        self.needs = 2 if objective.learns_entropy else 0
        self._wanted = (*objective.wanted, *(["ref_logps"] if objective.settings.kl_weight else []))

    def measure(self, batch: OnlineBatch) -> Sequence[float]:
        """Return nothing, or where the entropy is in the loss the terms and the tokens.
        What else couples completions was settled when the rollout was made.
        """
        tokens = len(batch.groups.rows) if batch.kept is None else np.count_nonzero(batch.kept)
        return [float(self._objective.count(batch)), float(tokens)] if self.needs else []

    def __call__(self, batch: OnlineBatch, totals: Sequence[float] = ()) -> LossTerms:
        """Compute the batch's terms.
        An entropy in the loss reads the number of the step's terms and tokens, and nothing else of it.
        """
        self._tokens_per_term = 1.0
        if self.needs:
            require_totals(totals, 2)
            self._tokens_per_term = max(totals[1], 1.0) / totals[0]
        return self._objective.terms(self, batch)

    def forward(
        self, batch: OnlineBatch, beside: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Run the model on the batch's row.

        Args:
            batch: of which every array that the method needs is there.
            beside: function (hidden states float[T, D], positions int64[M]) → float[M], called inside the forward, such as a
                value head.

        Returns:
            tuple: log-probabilities with gradients, entropy, which has them where it is in the loss, and what `beside`
                returned (None without it), float32[M] each.

        Raises:
            PackedBatchError: the row is malformed, or an array is missing or of another length.
        """
        check_online(batch, *self._wanted)
        inputs = self._completions.inputs(batch.groups)
        rows, targets, _ = group_tensors(batch.groups, self.device)
        inside = None if beside is None else lambda hidden: beside(hidden, rows)
        logps, entropy, *rest = self._completions.head.logps_and_entropy(
            inputs, rows, targets, temperature=self._objective.settings.temperature, beside=inside, learned=self.needs > 0
        )
        return logps, entropy, rest[0] if rest else None

    def chosen(self, batch: OnlineBatch) -> dict[str, Any]:
        """Return the batch's tokens that were chosen among all of the step's, if a loss chooses."""
        del batch
        return {}

    def policy(self, batch: OnlineBatch, logps: torch.Tensor, entropy: torch.Tensor) -> LossTerms:
        """Compute the policy's terms, with the stats that all online methods have."""
        objective = self._objective
        lengths = torch.tensor(np.asarray(batch.groups.lengths), dtype=torch.int64)
        advantages, kept = np.asarray(batch.advantages), batch.kept
        if not objective.settings.policy.per_token:
            # All of a completion's tokens carry its advantage; a loss of the completion needs it once, and by the share of its
            # tokens that are kept: the loss is linear in it, without a change of sign.
            starts = np.cumsum(batch.groups.lengths) - np.asarray(batch.groups.lengths)
            advantages = advantages[starts]
            if kept is not None and len(starts):
                advantages = advantages * (np.add.reduceat(kept, starts, dtype=np.float32) / batch.groups.lengths)
        elif kept is not None:
            advantages = advantages * kept
        terms = policy_gradient(
            logps,
            to_float32(batch.old_logps, self.device),
            to_float32(advantages, self.device),
            lengths,
            kind=objective.kind,
            **objective.loss_options(batch, self.device),
            **self.chosen(batch),
        )
        from_reference = logps.new_zeros(())
        if objective.settings.kl_weight and batch.ref_logps is not None:
            from_reference = kl(logps.detach(), to_float32(batch.ref_logps, self.device)).sum
        stats = terms.stats
        further = {}
        if self.needs:
            # The loop divides by the terms; the mean is over tokens.
            total = (entropy if kept is None else entropy * to_float32(kept, self.device)).sum()
            further = {
                "kept": logps.new_tensor(float(len(logps) if kept is None else np.count_nonzero(kept))),
                "kept_entropy": total.detach(),
            }
            bonus = objective.entropy_weight / self._tokens_per_term * total
            terms = terms._replace(sum=terms.sum - bonus, per_sample=None)
        return terms._replace(
            count=terms.count + (batch.masked if objective.unit == "completions" else 0),
            stats={
                "completions": logps.new_tensor(float(len(lengths))),
                "rewards": to_float32(batch.rewards, self.device).sum(),
                "tokens": logps.new_tensor(float(len(logps))),
                "entropy": entropy.detach().sum(),
                "kl": from_reference,
                "clipped": stats["clipped_low"] + stats["clipped_high"],
                "ratio": stats["ratio"],
                "approx_kl": stats["approx_kl"],
                **further,
            },
        )
