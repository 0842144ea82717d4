"""Group-relative policy optimisation: completions of one prompt, weighed beside each other."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from forge_algos.batches._online import OnlineBatch
from forge_algos.heads._completions import to_float32
from forge_algos.losses import LossTerms
from forge_algos.objectives.policy._covariance import BoundChoosing
from forge_algos.objectives.policy._entropy_control import EntropyControl
from forge_algos.objectives.policy._online import BoundOnline, OnlineObjective
from forge_algos.settings._grpo import GRPOSettings

_EPSILON = float(np.finfo(np.float32).eps)
"""Of the advantages, which are float32: a pair's loss is at most 15.9."""


class GRPO(OnlineObjective[GRPOSettings]):
    """GRPO (arXiv 2402.03300): the clipped ratio times the group's advantage, plus the KL.

    The KL is `kl_weight` times an estimate to the reference, here or in the rewards (`kl_in_reward`). `settings.loss_type`
    names the kind; terms are completions (grpo, dr_grpo, gmpo, gspo, luspo, sapo) or tokens (dapo, cispo, vespo), as its row in
    `POLICY_KINDS` has it. Where tokens are chosen by their covariance (clip_cov, kl_cov) a step makes one forward more, without
    gradients: they are chosen among all of its tokens. `entropy_coef` times the policy's entropy, a mean over the step's
    tokens, is subtracted. With `top_entropy_quantile` tokens of less entropy have no part in either.

    With `loss_type="online_dpo"` the terms are the best and the worst completion of each prompt, as one pair: the loss is DPO's
    (arXiv 2305.18290, equation 7) with `kl_weight` as β, on the policy that sampled them, or with "online_ipo" IPO's.
    """

    def __init__(self, settings: GRPOSettings | None = None) -> None:
        """Take the settings; None takes their defaults."""
        super().__init__(GRPOSettings() if settings is None else settings, GRPOSettings)
        self._control = EntropyControl(self.settings) if self.settings.use_adaptive_entropy else None

    @property
    def learns_entropy(self) -> bool:
        """Whether the entropy is in the loss, in some steps at least."""
        return self._control is not None or self.entropy_weight > 0

    @property
    def entropy_weight(self) -> float:
        """`entropy_coef`, or what it has become with `use_adaptive_entropy`."""
        return self.settings.entropy_coef if self._control is None else self._control.weight

    @property
    def stats(self) -> tuple[str, ...]:
        """Names of the sums, those of chosen tokens and of the entropy that is followed among them."""
        chosen = ("chosen",) if self.settings.policy.chooses else ()
        return super().stats + chosen + (() if self._control is None else ("kept", "kept_entropy"))

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divide each sum; `chosen` is the share of the tokens that were chosen by covariance.
        With `use_adaptive_entropy` `kept_entropy` is over the tokens that the policy learns from.
        """
        found = super().figures(sums, count)
        if self.settings.policy.chooses:
            found["chosen"] = sums["chosen"] / max(1.0, sums["tokens"])
        if self._control is None or not sums["kept"]:  # of a rollout's least certain tokens a step may have none
            return found
        return {**found, "kept_entropy": sums["kept_entropy"] / sums["kept"]}

    def after_step(self, figures: Mapping[str, float]) -> None:
        """Move the coefficient of the entropy, where it follows a target."""
        if self._control is not None and "kept_entropy" in figures:
            self._control.follow(figures["kept_entropy"])

    def state(self) -> dict[str, float]:
        """Return the numbers that follow something: of the entropy, and the weight of the KL."""
        return super().state() | ({} if self._control is None else self._control.state())

    def resume(self, state: Mapping[str, float]) -> None:
        """Go on with these."""
        super().resume(state)
        if self._control is not None:
            self._control.resume(state)

    def bind(self, model: nn.Module, *, device: torch.device) -> BoundOnline:
        """Choose how the head is scored, and whether a step begins with a choice of tokens.

        Raises:
            PackedBatchError: the model does not keep a row's documents apart.
            AdapterError: virtual tokens that the model cannot be given.
        """
        return BoundChoosing(self, model, device=device) if self.settings.policy.chooses else super().bind(model, device=device)

    def terms(self, bound: BoundOnline, batch: OnlineBatch) -> LossTerms:
        """Compute the batch's terms; of pairs their value is DPO's loss, and their gradient its."""
        found = super().terms(bound, batch)
        if not self.settings.paired:
            return found
        # A completion's advantage is ±2β·σ(-βm), from which -log σ(βm) follows, or of IPO ±4(1/2β - m), from which its square
        # does; 0 is a pair without a preference.
        lengths = np.asarray(batch.groups.lengths)
        slopes = np.abs(np.asarray(batch.advantages, np.float64)[np.cumsum(lengths) - lengths])
        if self.settings.loss_type == "online_ipo":
            losses = np.square(slopes / 4)
        else:
            losses = -np.log1p(-np.minimum(slopes / (2 * self.settings.kl_weight), 1 - _EPSILON))
        return found._replace(sum=found.sum - found.sum.detach() + float(losses.sum()), per_sample=None)

    def loss_options(self, batch: OnlineBatch, device: torch.device) -> dict[str, Any]:
        """Return the clip or temperatures, the KL's weight and reference, the divisor of sums."""
        s = self.settings
        if s.paired:  # the KL is within the advantages, and nothing is clipped
            return {}
        divides = s.policy.reduce == "max_length"
        weight = 0.0 if s.kl_in_reward else s.kl_weight
        reference = to_float32(batch.ref_logps, device) if weight and batch.ref_logps is not None else None
        return super().loss_options(batch, device) | {
            "ratio": s.policy.ratio,
            "reduce": s.policy.reduce,
            "max_length": s.max_new_tokens if divides else None,
            "ref_logps": reference,
            "kl_weight": weight,
            "kl_estimator": s.kl_estimator,
            "dual_clip": s.dual_clip,
            "temperatures": s.gate,
            "gamma_weights": s.gamma_weights,
            "off_policy_threshold": s.off_policy_mask_threshold,
            "dro_beta": s.dro_beta,
            "kl_cov_coef": s.kl_cov_coef if s.policy.clipped == "cov_kl" else None,
        }
