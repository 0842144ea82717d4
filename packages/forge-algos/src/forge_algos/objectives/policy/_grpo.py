"""Group-relative policy optimisation: completions of one prompt, weighed beside each other."""

from typing import Any

import torch

from forge_algos.batches._online import OnlineBatch
from forge_algos.heads._completions import to_float32
from forge_algos.objectives.policy._online import OnlineObjective
from forge_algos.settings._online import GRPOSettings


class GRPO(OnlineObjective[GRPOSettings]):
    """GRPO (arXiv 2402.03300): the clipped ratio times the group's advantage, plus the KL.

    The KL is `kl_weight` times an estimate to the reference. `settings.loss_type` names the kind; terms are completions (grpo,
    dr_grpo, gspo, luspo, sapo) or tokens (dapo, cispo, vespo), as its row in `POLICY_KINDS` has it. `entropy_coef` times the
    policy's entropy, a mean over the step's tokens, is subtracted. With `top_entropy_quantile` tokens of less entropy have no
    part in either.
    """

    def __init__(self, settings: GRPOSettings | None = None) -> None:
        """Take the settings; None takes their defaults."""
        super().__init__(GRPOSettings() if settings is None else settings, GRPOSettings)

    @property
    def entropy_weight(self) -> float:
        """`entropy_coef`."""
        return self.settings.entropy_coef

    def loss_options(self, batch: OnlineBatch, device: torch.device) -> dict[str, Any]:
        """Return the clip or temperatures, the KL's weight and reference, the divisor of sums."""
        s = self.settings
        divides = s.policy.reduce == "max_length"
        reference = to_float32(batch.ref_logps, device) if s.kl_weight and batch.ref_logps is not None else None
        return super().loss_options(batch, device) | {
            "ratio": s.policy.ratio,
            "max_length": s.max_new_tokens if divides else None,
            "ref_logps": reference,
            "kl_weight": s.kl_weight,
            "kl_estimator": s.kl_estimator,
            "dual_clip": s.dual_clip,
            "temperatures": s.gate,
            "gamma_weights": s.gamma_weights,
            "off_policy_threshold": s.off_policy_mask_threshold,
        }
