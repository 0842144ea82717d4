"""Table of policy losses: the ratio that each clips, its terms, and its options.

A policy loss is one row here: `losses.policy_gradient`, the objectives, and the choices and messages of the settings follow
from it. It is data, so that reading settings loads no torch.
"""

from typing import TYPE_CHECKING, Literal

import attrs

Ratio = Literal["token", "sequence_sum", "sequence_mean"]
Level = Literal["token", "sequence"]
Reduce = Literal["tokens", "mean", "sum", "max_length"]
Clipped = Literal["objective", "weight", "tokens", "gate", "gamma", "tv", "kl", "square", "cov", "cov_kl", "none"]
Scale = Literal["group", "batch", "nonzero", "none"]
Baseline = Literal["mean", "leave_one_out", "length", "second_best", "greedy", "optimal_token", "none"]


@attrs.frozen(kw_only=True)
class PolicyKind:
    """One policy loss.

    >>> PolicyKind(ratio="sequence_mean", reduce="tokens").per_token
    True
    """

    ratio: Ratio
    """Whose ratio π/π_old is clipped and weighed by the advantage:
    each token's own ("token"), or one of a whole completion: the product of its tokens' ratios ("sequence_sum", the
    exponential of their summed log-ratios) or their geometric mean ("sequence_mean")."""
    reduce: Reduce
    """What a term of the loss is: a token ("tokens"), or a completion:
    the mean over its tokens ("mean"), their sum ("sum"), or that divided by `max_length`, the longest that a completion may
    become ("max_length")."""
    clipped: Clipped = "objective"
    """What is clipped: the ratio in the objective, whose gradient ends there
    ("objective"), or the ratio as a weight without gradient of A · log π ("weight"), or the log-ratio of each token, of which
    the completion's is the mean ("tokens"); or nothing is, and a sigmoid of the ratio
    stands in its place, whose gradient fades on both sides of 1 ("gate"), or its weight without gradient of A · log π is one
    that falls on both sides of 1, the density of a Gamma distribution ("gamma"). Or a weight of A · log π without bounds of its
    own is 0 where the token's probability moved too far, by total variation ("tv") or Kullback-Leibler divergence ("kl") of
    the token and all others; or β/2 · (log-ratio)² holds A · log π near the policy that sampled ("square"). Or, among all of a
    step's tokens, some are chosen by the covariance of log π and A: they have no term, beside the clip of the ratio in the
    objective ("cov"), or |log-ratio| is added to theirs and nothing is clipped ("cov_kl"). Or there is no ratio, as in
    A · log π ("none")."""
    clip: tuple[float | None, float] = (0.2, 0.2)
    """How far the ratio may fall below 1, and rise above it, where nothing else is set;
    None does not bound it below. Not read where nothing is clipped."""
    kl: bool = True
    """Whether the loss may hold a KL to the reference (`kl_weight`);
    otherwise its KL is part of the reward."""
    grpo: bool = False
    """Whether it is a form of GRPO, which `GRPOSettings.loss_type` offers."""
    scale: Scale = "group"
    """What GRPO divides its advantages by where `scale_rewards` is not set:
    a standard deviation, of the group or the batch, or nothing."""
    first_as: str = ""
    """Plain kind with the same gradients while every ratio is 1, so that this one differs from it in later steps on a
    rollout alone; "" where there is none, or where it differs in the first step too."""

    @property
    def per_token(self) -> bool:
        """Whether each token has a loss of its own, also where all of a completion's have one ratio."""
        return self.ratio == "token" or self.weighs or self.reduce in ("tokens", "max_length")

    @property
    def diverges(self) -> bool:
        """Whether `clip` and `clip_high` bound a divergence of a token's probability."""
        return self.clipped in ("tv", "kl")

    @property
    def fixed(self) -> bool:
        """Whether the ratio is the kind's own, and no other may stand in its place."""
        return self.clipped in ("gamma", "tokens", "none", "square") or self.diverges or self.chooses

    @property
    def chooses(self) -> bool:
        """Whether tokens are chosen among all of a step's."""
        return self.clipped in ("cov", "cov_kl")

    @property
    def whole(self) -> bool:
        """Whether its loss is of a whole completion, whatever is averaged."""
        return self.clipped == "tokens" or (self.clipped == "none" and self.ratio != "token")

    @property
    def weighs(self) -> bool:
        """Whether the ratio is a weight without gradient of A · log π."""
        return self.clipped in ("weight", "gamma")

    @property
    def bounded(self) -> bool:
        """Whether `clip` and `clip_high` are read at all."""
        return self.clipped in ("objective", "weight", "tokens", "cov") or self.diverges

    @property
    def unit(self) -> str:
        """Unit of the terms, in the plural: "tokens" or "completions"."""
        return "tokens" if self.reduce == "tokens" else "completions"

    def bounds(self, clip: float | None, clip_high: float | None) -> tuple[float | None, float]:
        """Return how far the ratio may fall and rise: what is set, else the kind's own."""
        low, high = self.clip if clip is None else (clip, clip)
        return low, high if clip_high is None else clip_high


POLICY_KINDS: dict[str, PolicyKind] = {
    "grpo": PolicyKind(ratio="token", reduce="mean", grpo=True),  # arXiv 2402.03300, equation 3
    "dr_grpo": PolicyKind(ratio="token", reduce="max_length", grpo=True, scale="none"),  # arXiv 2503.20783
    "dapo": PolicyKind(ratio="token", reduce="tokens", grpo=True),  # arXiv 2503.14476, equation 8
    "gspo": PolicyKind(  # arXiv 2507.18071, equations 5 to 7
        ratio="sequence_mean", reduce="mean", grpo=True, first_as="grpo", clip=(3e-4, 4e-4)
    ),
    "luspo": PolicyKind(ratio="sequence_mean", reduce="sum", grpo=True, clip=(3e-4, 4e-4)),  # arXiv 2602.05261; GSPO's clip
    "gmpo": PolicyKind(  # arXiv 2507.20673
        ratio="sequence_mean", reduce="mean", clipped="tokens", grpo=True, first_as="grpo", clip=(0.4, 0.4)
    ),
    "cispo": PolicyKind(  # arXiv 2506.13585, equations 4 and 5; the bound of arXiv 2510.13786
        ratio="token", reduce="tokens", clipped="weight", clip=(None, 4.0), grpo=True, first_as="dapo"
    ),
    "sapo": PolicyKind(ratio="token", reduce="mean", clipped="gate", grpo=True, first_as="grpo"),  # arXiv 2511.20347
    "vespo": PolicyKind(ratio="sequence_sum", reduce="tokens", clipped="gamma", grpo=True, first_as="dapo"),  # arXiv 2602.10693
    "dppo_tv": PolicyKind(  # arXiv 2602.04879
        ratio="token", reduce="tokens", clipped="tv", grpo=True, first_as="dapo", clip=(0.15, 0.15)
    ),
    "dppo_kl": PolicyKind(  # the same; verl's bounds
        ratio="token", reduce="tokens", clipped="kl", grpo=True, first_as="dapo", clip=(0.05, 0.05)
    ),
    "gpg": PolicyKind(ratio="token", reduce="tokens", clipped="none", grpo=True),  # arXiv 2504.02546
    "dro": PolicyKind(  # verl's, after arXiv 2405.19107
        ratio="token", reduce="tokens", clipped="square", grpo=True, first_as="dapo"
    ),
    "clip_cov": PolicyKind(ratio="token", reduce="tokens", clipped="cov", grpo=True),  # arXiv 2505.22617, equations 11 to 13
    "kl_cov": PolicyKind(  # the same, equations 14 and 15
        ratio="token", reduce="tokens", clipped="cov_kl", grpo=True, first_as="dapo"
    ),
    "online_dpo": PolicyKind(  # arXiv 2402.04792; its advantages are the slopes of a pair's DPO loss
        ratio="sequence_sum", reduce="mean", clipped="none", kl=False, grpo=True, scale="none"
    ),
    "online_ipo": PolicyKind(  # the same with the loss of arXiv 2310.12036, equation 17
        ratio="sequence_sum", reduce="mean", clipped="none", kl=False, grpo=True, scale="none"
    ),
    "ppo": PolicyKind(ratio="token", reduce="tokens"),  # arXiv 1707.06347, equation 7
    "rloo": PolicyKind(ratio="sequence_sum", reduce="mean", kl=False),  # arXiv 2402.14740
}
"""By the name that `policy_gradient(kind=...)` takes."""


GATE = (1.0, 1.05)
"""Temperatures of a gate where the advantage is positive, and where it is not, as in the paper of SAPO."""


GAMMA = ((2.0, 3.0), (3.0, 2.0))
"""(k, λ) of a Gamma weight where the advantage is not negative, and where it is, as TRL has them by default."""


def grpo_kinds() -> list[str]:
    """Return the names of the forms of GRPO, rows that were added later among them."""
    return [name for name, kind in POLICY_KINDS.items() if kind.grpo]


# The choices follow from the table, which no static type can express: to type checkers a form is any string.
if TYPE_CHECKING:
    GRPOLoss = str
else:
    GRPOLoss = Literal[tuple(grpo_kinds())]
