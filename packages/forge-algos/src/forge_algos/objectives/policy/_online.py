"""What PPO, GRPO and RLOO have in common: one forward of a row of completions, the clipped ratio, and what a person reads."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from forge_algos.batches._groups import group_tensors
from forge_algos.batches._online import OnlineBatch, check_online, idle_online
from forge_algos.heads._completions import Completions, numbers
from forge_algos.losses import LossTerms, kl, policy_gradient

Terms = tuple[LossTerms, dict[str, torch.Tensor]]


class Online:
    """What `train` asks of an online method and does not depend on which it is."""

    kind: str
    """Of `losses.policy_gradient`."""
    unit: str
    kl_weight: float
    further: ClassVar[tuple[str, ...]] = ()
    """Stats of this method alone."""
    wanted: ClassVar[tuple[str, ...]] = ()
    """Arrays of the batch that this method alone reads."""

    @property
    def stats(self) -> tuple[str, ...]:
        """Sums over completions (`completions`, `rewards`), tokens (`tokens`, `entropy`, `kl`) and terms (all others)."""
        return ("completions", "rewards", "tokens", "entropy", "kl", "clipped", "ratio", "approx_kl", *self.further)

    def count(self, batch: OnlineBatch) -> int:
        """Completions or tokens, as the method's `unit` says; without a forward."""
        if not len(batch.groups.lengths):
            return 0
        check_online(batch)
        return len(batch.groups.lengths) if self.unit == "completions" else len(batch.groups.rows)

    def samples(self, batch: OnlineBatch) -> int:
        """Completions."""
        return len(batch.groups.lengths)

    def tokens(self, batch: OnlineBatch) -> int:
        """Tokens of the row."""
        return len(batch.groups.input_ids)

    def idle(self) -> OnlineBatch:
        """Two made-up completions."""
        return idle_online()

    def figures(self, sums: Mapping[str, float], count: int) -> dict[str, float]:
        """Means: `reward` and `length` over completions; `entropy` of the policy and `kl` from the reference (k3) over tokens;
        over terms `clipped` (where the clip binds), the `ratio` to the policy that sampled, and `approx_kl` from it (k3).
        """
        completions, tokens = max(1.0, sums["completions"]), max(1.0, sums["tokens"])
        found = {
            "reward": sums["rewards"] / completions,
            "length": sums["tokens"] / completions,
            "entropy": sums["entropy"] / tokens,
            **{name: sums[name] / count for name in ("clipped", "ratio", "approx_kl", *self.further)},
        }
        return found | ({"kl": sums["kl"] / tokens} if self.kl_weight else {})


class BoundOnline(ABC):
    """An online method on one model: one forward a batch, at the sampling temperature."""

    needs = 0

    def __init__(self, objective: Online, model: nn.Module, *, temperature: float, device: torch.device) -> None:
        self._completions = Completions(model, device=device)
        self._objective = objective
        self._temperature = temperature
        self._wanted = (*objective.wanted, *(["ref_logps"] if objective.kl_weight else []))
        self.device = device

    def measure(self, batch: OnlineBatch) -> Sequence[float]:  # noqa: ARG002  the protocol's
        """Never asked: what couples completions was settled when the rollout was made."""
        return []

    @abstractmethod
    def __call__(self, batch: OnlineBatch, totals: Sequence[float] = ()) -> LossTerms:
        """The batch's terms; nothing of the rest of the step is read."""

    def forward(
        self, batch: OnlineBatch, beside: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """(logps, entropy, what `beside` makes of hidden[T, D] and rows[M]), float32[M] each."""
        check_online(batch, *self._wanted)
        inputs = self._completions.inputs(batch.groups)
        rows, targets, _ = group_tensors(batch.groups, self.device)
        inside = None if beside is None else lambda hidden: beside(hidden, rows)
        logps, entropy, *rest = self._completions.head.logps_and_entropy(
            inputs, rows, targets, temperature=self._temperature, beside=inside
        )
        return logps, entropy, rest[0] if rest else None

    def policy(self, batch: OnlineBatch, logps: torch.Tensor, entropy: torch.Tensor, **settings: Any) -> LossTerms:
        """The policy's terms, with the stats that all online methods have."""
        lengths = torch.tensor(np.asarray(batch.groups.lengths), dtype=torch.int64)
        of_token = np.asarray(batch.advantages)
        kind = self._objective.kind
        starts = np.cumsum(batch.groups.lengths) - np.asarray(batch.groups.lengths)
        terms = policy_gradient(
            logps,
            numbers(batch.old_logps, self.device),
            numbers(of_token[starts] if kind == "rloo" else of_token, self.device),
            lengths,
            kind=kind,
            **settings,
        )
        shift = logps.new_zeros(())
        if self._objective.kl_weight and batch.ref_logps is not None:
            shift = kl(logps.detach(), numbers(batch.ref_logps, self.device)).sum
        stats = terms.stats
        return terms._replace(
            stats={
                "completions": logps.new_tensor(float(len(lengths))),
                "rewards": numbers(batch.rewards, self.device).sum(),
                "tokens": logps.new_tensor(float(len(logps))),
                "entropy": entropy.sum(),
                "kl": shift,
                "clipped": stats["clipped_low"] + stats["clipped_high"],
                "ratio": stats["ratio"],
                "approx_kl": stats["approx_kl"],
            }
        )
