"""Settings of GRPO, its loss types and its baselines. Reading them loads no torch."""

import math
from typing import Any, ClassVar, Literal

import attrs

from forge_algos.settings._online import GroupSettings, changed, check_dual_clip
from forge_algos.settings._online_validators import above_or_none, above_share, share
from forge_algos.settings._policy_kinds import (
    GAMMA,
    GATE,
    POLICY_KINDS,
    Baseline,
    GRPOLoss,
    Level,
    PolicyKind,
    Reduce,
    Scale,
    grpo_kinds,
)
from forge_algos.settings._validators import key_of, logits_divisor, number, one_of

KLEstimator = Literal["k3", "unbiased"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

_BASELINE: Baseline = "mean"
_ADAPTIVE = ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
_GAMMA = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")


def _check_form(_instance: Any, field: Any, value: Any) -> None:
    # Read at each call, since rows may have been added to the table.
    key_of(grpo_kinds())(_instance, field, value)


@attrs.frozen(kw_only=True)
class GRPOSettings(GroupSettings):
    """Group-relative policy optimisation (arXiv 2402.03300) and its variants.

    >>> GRPOSettings(loss_type="dr_grpo").scale
    'none'
    """

    credit: ClassVar[str] = "group"

    loss_type: GRPOLoss = attrs.field(default="dapo", validator=_check_form)
    """What is averaged: completions' means over their tokens ("grpo"),
    their sums over max_new_tokens ("dr_grpo", arXiv 2503.20783), all tokens of the step ("dapo", arXiv 2503.14476); or
    completions with one ratio each ("gspo", arXiv 2507.18071), times their length ("luspo", arXiv 2602.05261); or tokens
    weighed by a bounded ratio ("cispo", arXiv 2506.13585); or completions whose ratio is made of bounded ratios of their tokens
    ("gmpo", arXiv 2507.20673); or completions' means where a sigmoid stands for the clip ("sapo",
    arXiv 2511.20347); or tokens weighed by a smooth function of their completion's ratio ("vespo", arXiv 2602.10693).
    Or tokens whose probability may not move further than a divergence ("dppo_tv", "dppo_kl", arXiv 2602.04879), or which have
    no ratio ("gpg", arXiv 2504.02546), or a square of its logarithm that `dro_beta` weighs ("dro").
    Or tokens of which those with a large covariance of log-probability and advantage have no term ("clip_cov"), or are held
    near the policy that sampled ("kl_cov", both arXiv 2505.22617).
    Or DPO on the best and the worst completion of each prompt ("online_dpo", arXiv 2402.04792; "online_ipo" with the loss of
    arXiv 2310.12036), whose β is kl_weight."""
    loss_reduction: Reduce | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(Reduce)))
    """What is averaged, in the place of what the loss type averages: tokens of the step ("tokens"), or of
    completions the means over their tokens ("mean"), their sums ("sum"), or these over max_new_tokens ("max_length")."""
    dro_beta: float | None = attrs.field(default=None, validator=above_or_none)
    """β of loss_type=dro, which needs it: half of it weighs the squared log-ratio of each token to the policy that sampled."""
    clip_cov_ratio: float = attrs.field(default=2e-4, validator=above_share)
    """Share of a step's tokens, above 0, that loss_type=clip_cov leaves without a term, at most: drawn by lot from those whose
    covariance lies between clip_cov_lb and clip_cov_ub."""
    clip_cov_lb: float = attrs.field(default=1.0, validator=number(kind=float, low=-math.inf))
    """Covariance above which loss_type=clip_cov may leave a token out."""
    clip_cov_ub: float = attrs.field(default=5.0, validator=number(kind=float, low=-math.inf))
    """Covariance below which loss_type=clip_cov may leave a token out."""
    kl_cov_ratio: float = attrs.field(default=2e-4, validator=above_share)
    """Share of a step's tokens, above 0, with the largest covariances, that loss_type=kl_cov holds near the policy that
    sampled."""
    kl_cov_coef: float = attrs.field(default=1.0, validator=number(kind=float, above=True))
    """Weight of the absolute log-ratio of those tokens in the loss of loss_type=kl_cov: from the second step on a rollout
    on, with num_iterations or updates_per_pass above 1."""
    importance_sampling_level: Level | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(Level)))
    """Whose ratio to the policy that sampled it is: each token's own ("token"), or a completion's, the geometric mean of its
    tokens' ("sequence"). By default the loss type's: a completion's for gspo and luspo."""
    sapo_temperature_pos: float = attrs.field(default=GATE[0], validator=logits_divisor)
    """Temperature of loss_type=sapo where the advantage is positive:
    the larger, the faster the gradient fades as the ratio leaves 1."""
    sapo_temperature_neg: float = attrs.field(default=GATE[1], validator=logits_divisor)
    """Temperature of loss_type=sapo where the advantage is not positive."""
    vespo_k_pos: float = attrs.field(default=GAMMA[0][0], validator=number(kind=float))
    """k of loss_type=vespo where the advantage is not negative: a completion of ratio w has the weight
    w^k · e^(λ(1 - w)), so that the larger k, the less a completion counts that became less likely."""
    vespo_lambda_pos: float = attrs.field(default=GAMMA[0][1], validator=number(kind=float, above=True))
    """λ of loss_type=vespo where the advantage is not negative: the larger, the less a completion counts that became
    likelier."""
    vespo_k_neg: float = attrs.field(default=GAMMA[1][0], validator=number(kind=float))
    """k of loss_type=vespo where the advantage is negative."""
    vespo_lambda_neg: float = attrs.field(default=GAMMA[1][1], validator=number(kind=float, above=True))
    """λ of loss_type=vespo where the advantage is negative."""
    off_policy_mask_threshold: float | None = attrs.field(default=None, validator=above_or_none)
    """Mean fall of a completion's log-probabilities since it was sampled, in nats a token, above which
    a completion with a negative advantage has no term but its KL's (DeepSeek-V3.2, arXiv 2512.02556); by default none is left
    out."""
    dual_clip: float | None = attrs.field(default=None, validator=above_or_none)
    """What the ratio counts at most where the advantage is negative, above 1 + clip_high;
    by default it has no bound there. With dppo_tv and dppo_kl whatever the advantage, above 1."""
    entropy_coef: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the policy's entropy in nats, a mean over all tokens of the step,
    which is subtracted from the loss: it keeps the policy from becoming certain."""
    use_adaptive_entropy: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether `entropy_coef` is where that weight begins: it rises by `entropy_coef_delta` with each step whose mean entropy is
    at most `entropy_target`, falls with others, and weighs a step after such a one alone (Skywork-OR1, arXiv 2505.22312)."""
    entropy_target: float = attrs.field(default=0.2, validator=number(kind=float))
    """Entropy in nats, a mean over the tokens that the policy learns from, that use_adaptive_entropy keeps it above."""
    entropy_coef_delta: float = attrs.field(default=0.005, validator=number(kind=float, above=True))
    """How much the weight of use_adaptive_entropy changes with a step."""
    entropy_coef_min: float = attrs.field(default=0.0, validator=number(kind=float))
    """Least weight of use_adaptive_entropy."""
    entropy_coef_max: float = attrs.field(default=1.0, validator=number(kind=float))
    """Greatest weight of use_adaptive_entropy."""
    top_entropy_quantile: float = attrs.field(default=1.0, validator=share)
    """Share of a rollout's tokens that the policy learns from, those before which it was least certain (arXiv 2506.01939,
    which takes 0.2); others have no term but their KL's, and count in means all the same."""
    num_generations: int = attrs.field(default=8, validator=number(kind=int, low=1))
    """Number of completions of each prompt: a group, within which rewards are compared;
    1 with baseline=none or greedy alone."""
    scale_rewards: Scale | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(Scale)))
    """Divisor of the advantages: the standard deviation of the group's rewards ("group"),
    of the rollout's ("batch"), the share of the rollout's rewards that are not 0 ("nonzero", GPG), or "none". By default the
    group's, and none for dr_grpo, with `whiten`, or with another baseline than the mean."""
    baseline: Baseline = attrs.field(default=_BASELINE, validator=one_of(Baseline))
    """What is subtracted from a reward: the mean of its group ("mean"), of the group's
    others ("leave_one_out"), of the group by number of tokens ("length", OPO, arXiv 2505.23585), or nothing ("none",
    REINFORCE++, arXiv 2501.03262). With "second_best" only the best of a group has an advantage, what it has above the second
    best (Pass@k, arXiv 2503.19595). Or the reward of one answer more to each prompt, of the likeliest tokens, which is not
    learned from ("greedy", ReMax, arXiv 2310.10505). Or each token has a baseline of its own, the mean over its place in the
    group's answers, weighed by how uncertain they were up to it ("optimal_token", OTB)."""
    whiten: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether a rollout's advantages are scaled to mean 0 and deviation 1 over its tokens
    (REINFORCE++, arXiv 2501.03262)."""
    multi_objective_aggregation: Aggregation = attrs.field(default="sum_then_normalize", validator=one_of(Aggregation))
    """How several rewards become one advantage: their weighted sum is normalised
    ("sum_then_normalize"), or each is normalised within its group, and then their weighted sum over the rollout
    ("normalize_then_sum", GDPO, arXiv 2601.05242). A penalty is then one reward more."""
    kl_weight: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the KL divergence from the reference, a part of the loss;
    0 needs no reference. With loss_type=online_dpo it is DPO's β, above 0; 0.1 is usual."""
    kl_in_reward: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether that divergence (k1, summed over a completion) is subtracted from the reward, and
    no part of the loss; with baseline=none, greedy or optimal_token from each token's, from that token on."""
    kl_estimator: KLEstimator = attrs.field(default="k3", validator=one_of(KLEstimator))
    """Estimate of that divergence: k3 of each token ("k3"), or k3 weighed by the ratio,
    whose gradient is that of the true divergence ("unbiased", DeepSeek-V3.2)."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        kind = POLICY_KINDS[self.loss_type]
        if self.kl_estimator != "k3" and not self.kl_weight:
            raise ValueError(
                f"kl_estimator={self.kl_estimator!r} has no effect with kl_weight=0; set a weight, or leave it out"
            )
        self._check_alone(not self.use_adaptive_entropy, _ADAPTIVE, "with use_adaptive_entropy=False")
        if self.entropy_coef_min > self.entropy_coef_max:
            raise ValueError(f"entropy_coef_min={self.entropy_coef_min} is above entropy_coef_max={self.entropy_coef_max}")
        if self.use_adaptive_entropy and not self.entropy_coef_min <= self.entropy_coef <= self.entropy_coef_max:
            raise ValueError(
                f"entropy_coef={self.entropy_coef} is where use_adaptive_entropy begins: a weight from "
                f"entropy_coef_min={self.entropy_coef_min} to entropy_coef_max={self.entropy_coef_max} is wanted"
            )
        self._check_credit()
        decoupled = f"with multi_objective_aggregation={self.multi_objective_aggregation!r}"
        named = ("scale_rewards", "baseline", "whiten", "kl_in_reward")
        self._check_alone(self.decoupled, named, f"{decoupled}, which divides by deviations of its own")
        self._check_alone(self.decoupled, ("reward_clip_range",), f"{decoupled}, which adds up no rewards as they are")
        form = f"with loss_type={self.loss_type!r}"
        if self.paired:
            self._check_paired(form)
        self._check_alone(not kind.bounded, ("clip", "clip_high", "dual_clip"), f"{form}, which clips nothing")
        self._check_alone(kind.clipped != "gate", ("sapo_temperature_pos", "sapo_temperature_neg"), form)
        self._check_alone(kind.clipped != "gamma", _GAMMA, form)
        self._check_alone(kind.clipped != "cov", ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"), form)
        self._check_alone(kind.clipped != "cov_kl", ("kl_cov_ratio", "kl_cov_coef"), form)
        if not self.clip_cov_lb < self.clip_cov_ub:
            raise ValueError(f"clip_cov_lb={self.clip_cov_lb} must be below clip_cov_ub={self.clip_cov_ub}")
        self._check_alone(kind.chooses, ("top_entropy_quantile",), f"{form}, which chooses among all tokens of a step")
        whose = "whose ratio is a token's" if kind.ratio == "token" else "whose ratio is a completion's"
        fixed = "which has no ratio" if kind.clipped == "none" else whose
        self._check_alone(kind.fixed, ("importance_sampling_level",), f"{form}, {fixed}")
        self._check_alone(kind.whole, ("loss_reduction",), f"{form}, whose losses are of whole completions")
        if (self.dro_beta is None) == (kind.clipped == "square"):
            needs = (
                "needs dro_beta, above 0" if self.dro_beta is None else f"does not read dro_beta={self.dro_beta}; leave it out"
            )
            raise ValueError(f"loss_type={self.loss_type!r} {needs}")
        if self.dual_clip is not None and kind.clipped in ("weight", "tokens", "cov"):
            why = "which bounds the ratios of tokens instead" if kind.clipped == "tokens" else "whose ratio clip_high bounds"
            raise ValueError(f"dual_clip has no effect with loss_type={self.loss_type!r}, {why}")
        check_dual_clip(self, self.dual_clip)

    def _check_credit(self) -> None:
        """Refuse combinations of baseline, scale, whitening and the place of the KL."""
        if self.num_generations < 2 and self.baseline not in ("none", "greedy"):
            remedy = (
                "a pair is of two completions"
                if self.paired
                else "a reward is compared with its group's; or set baseline to 'none' or 'greedy'"
            )
            raise ValueError(f"num_generations must be at least 2, got {self.num_generations}: {remedy}")
        if self.kl_in_reward and not self.kl_weight:
            raise ValueError("kl_in_reward=True has no effect with kl_weight=0; set a weight, or leave it out")
        if self.kl_target is not None and not self.kl_in_reward:
            raise ValueError(
                f"kl_target={self.kl_target} has no effect with kl_in_reward=False: it steers the weight of a KL in the "
                "rewards; set kl_in_reward=True, or leave it out"
            )
        self._check_alone(self.kl_in_reward, ("kl_estimator",), "with kl_in_reward=True, which subtracts k1")
        if self.whiten and self.scale in ("batch", "nonzero"):
            raise ValueError(f"scale_rewards={self.scale!r} has no effect with whiten=True, which divides by another deviation")
        if self.baseline == "none" and self.scale in ("group", "batch"):
            raise ValueError(
                f"scale_rewards={self.scale!r} with baseline='none' divides rewards that are all equal by a deviation of 0, to "
                "which 0.0001 is added: they would count 10,000-fold; set whiten=True, or leave scale_rewards out"
            )
        if self.baseline in ("greedy", "optimal_token") and self.scale != "none":
            raise ValueError(
                f"scale_rewards={self.scale!r} has no effect with baseline={self.baseline!r}, which divides by nothing; leave "
                "it out, or set whiten=True"
            )
        of_tokens = self.kl_in_reward and self.baseline in ("none", "greedy")
        self._check_alone(self.baseline == "optimal_token", ("top_entropy_quantile",), "with baseline='optimal_token'")
        if self.kl_in_reward and self.scale == "nonzero":
            raise ValueError(
                "scale_rewards='nonzero' has no effect with kl_in_reward=True, which leaves no reward at 0; leave one out"
            )
        if (of_tokens or self.baseline == "optimal_token") and not self.policy.per_token:
            raise ValueError(
                f"{'kl_in_reward=True with ' * of_tokens}baseline={self.baseline!r} gives each token an advantage of its own, "
                f"and loss_type={self.loss_type!r} weighs whole completions: choose another loss_type, or another baseline"
            )

    def _check_paired(self, form: str) -> None:
        """Refuse what pairs do not read, and steps on a rollout of an earlier policy."""
        if not self.kl_weight:
            raise ValueError(f"kl_weight=0 {form}: it is β of the loss, how closely the model stays to the reference; set 0.1")
        for name in ("num_iterations", "updates_per_pass"):
            if getattr(self, name) != 1:
                raise ValueError(
                    f"{name}={getattr(self, name)} {form}: a pair is learned from in one step, on the policy that sampled it; "
                    "leave it out"
                )
        names = ("scale_rewards", "off_policy_mask_threshold", "entropy_coef", "use_adaptive_entropy", "top_entropy_quantile")
        names += ("baseline", "whiten", "kl_in_reward")
        self._check_alone(True, (*names, "kl_estimator", "tis_cap", "multi_objective_aggregation"), form)  # noqa: FBT003

    def _read_later(self) -> tuple[str, ...]:
        # Another ratio or mean, and terms of a token that differ by token, make another gradient of whole completions.
        plain = self.loss_reduction is None and self.importance_sampling_level is None
        plain &= self.policy.ratio == "token" or (self.top_entropy_quantile == 1 and self.sampler == "transformers")
        later = ("loss_type",) if plain and self.policy.first_as else ()
        names = ("dual_clip", "sapo_temperature_pos", "sapo_temperature_neg", *_GAMMA, "off_policy_mask_threshold")
        return later + super()._read_later() + changed(self, (*names, "kl_cov_ratio", "kl_cov_coef"))

    @property
    def paired(self) -> bool:
        """Whether `loss_type` is online_dpo or online_ipo."""
        return self.loss_type in ("online_dpo", "online_ipo")

    @property
    def kind(self) -> str:
        """`loss_type`."""
        return self.loss_type

    @property
    def policy(self) -> PolicyKind:
        """Row of `loss_type`, with the ratio and the terms that other settings name."""
        row, level = POLICY_KINDS[self.loss_type], self.importance_sampling_level
        row = row if self.loss_reduction is None else attrs.evolve(row, reduce=self.loss_reduction)
        if level is None or (level == "sequence" and row.ratio != "token"):
            return row
        return attrs.evolve(row, ratio="token" if level == "token" else "sequence_mean")

    @property
    def decoupled(self) -> bool:
        """Whether each reward is normalised by itself."""
        return self.multi_objective_aggregation == "normalize_then_sum"

    @property
    def gate(self) -> tuple[float, float] | None:
        """Temperatures of the loss type, where it has some."""
        temperatures = self.sapo_temperature_pos, self.sapo_temperature_neg
        return temperatures if POLICY_KINDS[self.loss_type].clipped == "gate" else None

    @property
    def gamma_weights(self) -> tuple[tuple[float, float], tuple[float, float]] | None:
        """(k, λ) of the loss type, advantages that are not negative first, where it has some."""
        if POLICY_KINDS[self.loss_type].clipped != "gamma":
            return None
        return (self.vespo_k_pos, self.vespo_lambda_pos), (self.vespo_k_neg, self.vespo_lambda_neg)

    @property
    def scale(self) -> Scale:
        """`scale_rewards`, or the default of the loss type."""
        plain = self.whiten or self.baseline != "mean"
        return self.scale_rewards or ("none" if plain else POLICY_KINDS[self.loss_type].scale)
