"""Kahneman-Tversky optimisation: completions that are good or bad, around the step's KL."""

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import mode
from forge_algos._parallel import Parallel
from forge_algos.batches._copies import to_device
from forge_algos.batches._groups import PackedGroups, check_groups, idle_groups
from forge_algos.batches._learned import token_count
from forge_algos.batches._packed import require
from forge_algos.heads._completions import Completions, sum_by_completion
from forge_algos.losses import LossTerms, kto
from forge_algos.objectives._mean import Mean, require_totals
from forge_algos.objectives._objective import BeginsSteps, Weights
from forge_algos.objectives.preference._reference import Reference
from forge_algos.settings._preference import KTOSettings
from forge_algos.settings._validators import settings_of


@attrs.frozen(kw_only=True, eq=False)
class KTOBatch:
    """B completions, and for a KL B more in which the prompts have other samples' completions."""

    completions: PackedGroups
    """B groups of one."""
    mismatched: PackedGroups | None = None
    """B groups of one: the same prompts, each with a completion of another sample;
    the KL is estimated from them. None for a loss without a KL."""
    desirable: NDArray[np.bool_]
    """bool[B]: whether a completion is a good one."""
    ref_logps: NDArray[np.float32] | None = None
    """float32[B]: log-probabilities of `completions` under the reference, in nats,
    as `reference_logps` gives them."""
    ref_mismatched_logps: NDArray[np.float32] | None = None
    """float32[B]: those of `mismatched`."""


@attrs.frozen
class KTO:
    """KTO (arXiv 2402.01306, equation 7): w(1 - σ(±β(r - z))), r = log π/π_ref, z = max(KL, 0).

    The sign is + where a completion is desirable. Before a step's first term all its mismatched completions are run without
    gradients: their mean r, over all micro-batches and data shards, is the KL. With it no completion's term depends on another,
    so the gradients do not depend on how the step is cut, and a micro-batch may hold one completion, or one class alone. With
    `normalize="trl"` each micro-batch has a KL of its own, that of the same rank (TRL adds the mean over ranks).

    With `loss_type="apo_zero_unpaired"` z is 0 (arXiv 2408.06266, equation 7, for single completions): good ones become
    likelier than under the reference, bad ones less likely, and no mismatched completion is run.

    Figures: `kl`, where there is one; `chosen_reward` and `rejected_reward`, the mean β·r of the good and of the bad, and
    `margin`, the first less the second, where there are such; `accuracy`, the share of completions that lie on their side of
    the KL, or of 0.
    """

    settings: KTOSettings = attrs.field(factory=KTOSettings, validator=settings_of(KTOSettings))
    reference: nn.Module | Weights | None = attrs.field(default=None, kw_only=True)
    """The frozen second model of `reference="live"`, on the same device; of "moving" what gives the trained model
    the reference's weights, as `WeightAverage.exchanged`; None otherwise."""

    @property
    def unit(self) -> str:
        """Unit of `count`."""
        return "completions"

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the sums behind the figures."""
        return ("chosen_rewards", "rejected_rewards", "desirable", "correct", "kl")

    def count(self, batch: KTOBatch) -> int:
        """Count the completions B, without a forward."""
        require(batch, "completions", "a KTOBatch")
        if not len(batch.completions.group_sizes):
            return 0
        _check(batch, self.settings)
        return len(batch.desirable)

    def samples(self, batch: KTOBatch) -> int:
        """Count the completions B."""
        return len(batch.completions.group_sizes)

    def tokens(self, batch: KTOBatch) -> int:
        """Count the tokens of both rows."""
        return token_count(batch.completions) + (0 if batch.mismatched is None else token_count(batch.mismatched))

    def idle(self) -> KTOBatch:
        """Make one completion, good and mismatched."""
        made, nothing = idle_groups((1,)), np.zeros(1, np.float32)
        other = made if self.settings.estimates_kl else None
        return KTOBatch(
            completions=made, mismatched=other, desirable=np.ones(1, bool), ref_logps=nothing, ref_mismatched_logps=nothing
        )

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide by the number of completions of each class; a class without any is left out."""
        found = {"accuracy": sums["correct"] / count}
        if self.settings.estimates_kl:
            found["kl"] = sums["kl"] / count
        for name, number in (("chosen", sums["desirable"]), ("rejected", count - sums["desirable"])):
            if number:
                found[f"{name}_reward"] = sums[f"{name}_rewards"] / number
        if {"chosen_reward", "rejected_reward"} <= found.keys():
            found["margin"] = found["chosen_reward"] - found["rejected_reward"]
        return found

    def bind(self, model: nn.Module, *, device: torch.device) -> "_BoundKTO":
        """Choose how this model, and a live reference, are run.

        Raises:
            PackedBatchError: a model does not keep the completions of a row apart.
            AdapterError: virtual tokens that a model cannot be given, or `adapter_off` without an adapter.
            LossError: a live reference that is missing, not asked for, or the model itself.
        """
        kind = _BoundMovingKTO if self.settings.reference == "moving" else _BoundKTO
        return kind(self.settings, self.reference, model, device)


class _BoundKTO:
    def __init__(self, settings: KTOSettings, live: nn.Module | Weights | None, model: nn.Module, device: torch.device) -> None:
        self.settings = settings
        self.policy = Completions(model, device=device)
        self.reference = Reference(settings.reference, self.policy, live)
        self.mean = Mean(settings.normalize)
        self.needs = 2 if settings.estimates_kl else self.mean.needs

    def measure(self, batch: KTOBatch) -> Sequence[float | torch.Tensor]:
        if self.mean.trl or not self.settings.estimates_kl:
            return self.mean.measure(len(batch.desirable))
        drift = self._drift(batch)
        return [drift.sum(), float(len(drift))]

    def __call__(self, batch: KTOBatch, totals: Sequence[float]) -> LossTerms:
        _check(batch, self.settings)
        kl: float | torch.Tensor = 0.0
        if self.settings.estimates_kl:
            require_totals(totals, 2)
            kl = self._drift(batch).mean() if self.mean.trl else totals[0] / totals[1]
        logps, reference = self._both(batch)
        # Made where it is read: the host waits for a device that it copies a number to.
        kl = kl.to(logps) if isinstance(kl, torch.Tensor) else logps.new_full((), kl)
        return self.mean(self._terms(logps, reference, batch.desirable, kl.clamp(min=0)), totals)

    def at_start(self, batch: KTOBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return what `check_reference` compares.

        Returns:
            tuple: terms[2B]; the terms[2B] of a model that is its own reference; how far each is off, in nats[2B]. Completions
                stand first, then the mismatched ones; without a KL they are B.
        """
        _check(batch, self.settings)
        logps, reference = self._both(batch)
        drift = logps - reference
        if self.settings.estimates_kl:
            drift = torch.cat([drift, self._drift(batch)])
        kinds, zero = np.resize(batch.desirable, len(drift)), torch.zeros_like(drift)
        found, expected = (self._terms(ratios, zero, kinds, zero.sum()).per_sample for ratios in (drift, zero))
        assert found is not None
        assert expected is not None
        return found, expected, drift.abs()

    def _both(self, batch: KTOBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the completions' log-probabilities float32[B] under model and reference."""
        logps = sum_by_completion(self.policy.tokens(batch.completions), batch.completions)
        return logps, self.reference(batch.completions, batch.ref_logps)

    def _drift(self, batch: KTOBatch) -> torch.Tensor:
        """Return each mismatched completion's r, float32[B], without gradients and dropout."""
        assert batch.mismatched is not None
        with torch.no_grad(), mode(self.policy.model, training=False):
            logps = sum_by_completion(self.policy.tokens(batch.mismatched), batch.mismatched)
        return logps - self.reference(batch.mismatched, batch.ref_mismatched_logps, "ref_mismatched_logps")

    def _terms(self, logps: torch.Tensor, reference: torch.Tensor, desirable: NDArray[np.bool_], kl: torch.Tensor) -> LossTerms:
        settings = self.settings
        good = to_device(desirable, logps.device, torch.bool)
        weights = {"desirable_weight": settings.desirable_weight, "undesirable_weight": settings.undesirable_weight}
        terms = kto(logps, reference, good, kl, beta=settings.beta, **weights)
        ratios = (logps - reference).detach()
        correct = torch.where(good, ratios > kl, ratios < kl).sum()
        return terms._replace(stats=dict(terms.stats) | {"correct": correct, "kl": kl * len(logps)})


class _BoundMovingKTO(_BoundKTO, BeginsSteps):
    def begin(self, batches: Sequence[KTOBatch | None], parallel: Parallel) -> None:
        del parallel
        own = 2 if self.settings.estimates_kl else 1
        rows = [(None, None)[:own] if batch is None else (batch.completions, batch.mismatched)[:own] for batch in batches]
        self.reference.begin([row for both in rows for row in both], completions=1)


def _check(batch: KTOBatch, settings: KTOSettings) -> None:
    require(batch, "completions", "a KTOBatch")
    B = len(batch.completions.group_sizes)
    if batch.mismatched is None and settings.estimates_kl:
        raise PackedBatchError(f"mismatched: {B} groups are wanted, from which loss_type={settings.loss_type!r} has its KL")
    for name in ("completions", "mismatched"):
        groups: PackedGroups | None = getattr(batch, name)
        if groups is None:
            continue
        check_groups(groups)
        sizes = np.asarray(groups.group_sizes)
        if len(sizes) != B or (sizes != 1).any():
            raise PackedBatchError(f"{name}: {B} groups of one completion are wanted, got groups of {sizes.tolist()[:8]}")
    for name in ("desirable", "ref_logps", "ref_mismatched_logps"):
        found: Any = getattr(batch, name)
        if found is not None and np.shape(found) != (B,):
            raise PackedBatchError(f"{name}: {B} values are wanted for {B} completions, got {list(np.shape(found))}")
    desirable = np.asarray(batch.desirable)
    if not np.isin(desirable, (0, 1)).all():
        raise PackedBatchError(f"desirable: True and False are wanted, or 1 and 0, got {desirable.tolist()[:8]}")
