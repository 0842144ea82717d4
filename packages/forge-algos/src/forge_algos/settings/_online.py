"""Settings of the online methods: PPO, GRPO and RLOO. Reading them loads no torch.

Shared by all three: how completions are sampled, what rewards them, how often a rollout is used, and what happens to
completions that were cut off or could not be scored.
"""

from typing import Any, ClassVar, Literal

import attrs

from forge_algos.settings._online_validators import (
    as_tuple,
    check_class,
    check_range,
    check_rewards,
    check_url,
    check_weights,
)
from forge_algos.settings._policy_kinds import (
    GAMMA,
    GATE,
    POLICY_KINDS,
    Baseline,
    GRPOLoss,
    Level,
    PolicyKind,
    Scale,
    grpo_kinds,
)
from forge_algos.settings._validators import key_of, number, one_of

OnRewardError = Literal["stop", "skip"]
OnEqualRewards = Literal["keep", "skip", "resample"]
SamplerKind = Literal["transformers", "vllm", "sglang"]
KLEstimator = Literal["k3", "unbiased"]
PolicyReference = Literal["initial", "moving"]
Aggregation = Literal["sum_then_normalize", "normalize_then_sum"]

# Any: the type checker does not follow a default of one type with a validator of another.
_share: Any = attrs.validators.and_(number(kind=float), attrs.validators.le(1))
_above_share: Any = attrs.validators.and_(number(kind=float, above=True), attrs.validators.le(1))
_clip_or_none: Any = attrs.validators.optional(number(kind=float, above=True, below=1.0))
_number_or_none: Any = attrs.validators.optional(number(kind=float, low=float("-inf")))
_above_or_none: Any = attrs.validators.optional(number(kind=float, above=True))


_ADAPTIVE = ("entropy_target", "entropy_coef_delta", "entropy_coef_min", "entropy_coef_max")
_GAMMA = ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")


def _check_form(_instance: Any, field: Any, value: Any) -> None:
    # Read at each call, since rows may have been added to the table.
    key_of(grpo_kinds())(_instance, field, value)


@attrs.frozen(kw_only=True)
class OnlineSettings:
    """Settings that PPO, GRPO and RLOO share; some have another default in one of them."""

    credit: ClassVar[str]
    """How rewards become advantages: a row of `forge_algos.online._credit.CREDITS`."""
    num_generations: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Number of completions of each prompt."""
    kl_weight: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the KL divergence from the reference; 0 needs no reference."""
    reference: PolicyReference = attrs.field(default="initial", validator=one_of(PolicyReference))
    """Reference of that divergence: the model that training starts from ("initial"),
    or one that follows the trained model ("moving"; TR-DPO, arXiv 2404.09656)."""
    reference_sync_steps: int = attrs.field(default=512, validator=number(kind=int, low=1))
    """Number of steps after which reference=moving moves towards the trained model, each time."""
    reference_mixup: float = attrs.field(default=0.6, validator=_above_share)
    """Share of the trained weights that reference=moving then takes on, above 0; 1 makes it a copy of them."""
    num_iterations: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Number of passes over each rollout."""
    reward: tuple[str, ...] = attrs.field(default=(), converter=as_tuple, validator=check_rewards)
    """Functions that reward a completion, as "package.module:function" or "file.py:function";
    their weighted sum is the reward. verl's `compute_score` and OpenRLHF's `reward_func` are called as there."""
    reward_weights: tuple[float, ...] | None = attrs.field(
        default=None, converter=as_tuple, validator=attrs.validators.optional(check_weights)
    )
    """Weight of each of `reward`, and then of the reward model where there is one;
    1 for each by default."""
    reward_model_path: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(str))
    )
    """Sequence classification model with one label, whose score is a further reward."""
    reward_clip_range: tuple[float, float] | None = attrs.field(
        default=None, converter=as_tuple, validator=attrs.validators.optional(check_range)
    )
    """Least and greatest number that the rewards of a completion may add up to,
    before penalties and the KL; by default they are not bounded."""
    on_reward_error: OnRewardError = attrs.field(default="stop", validator=one_of(OnRewardError))
    """What happens when a reward function raises or returns no number:
    the run stops, or those completions go unscored."""
    reward_timeout: float | None = attrs.field(default=None, validator=_above_or_none)
    """Seconds that a call of a reward function may take; null waits for ever.
    A call beyond it is an error, which `on_reward_error` treats as any other."""
    env: str | None = attrs.field(default=None, validator=attrs.validators.optional(check_class))
    """Environment that answers the model's turns, as "package.module:Class" with `reset` and
    `step`; what it gives over an episode is a further reward."""
    max_turns: int = attrs.field(default=8, validator=number(kind=int, low=1))
    """Number of turns of the model in an episode, at most; read with `env` alone."""
    env_timeout: float = attrs.field(default=60.0, validator=number(kind=float, above=True))
    """Seconds that a call of the environment may take; beyond it is an error, which
    `on_reward_error` treats as a reward's. Read with `env` alone."""
    sampler: SamplerKind = attrs.field(default="transformers", validator=one_of(SamplerKind))
    """What samples completions: the trained model itself ("transformers"), or a server of
    vLLM or SGLang that runs in an environment of its own."""
    sampler_url: str | None = attrs.field(default=None, validator=attrs.validators.optional(check_url))
    """Address of the server, such as http://127.0.0.1:8000; it must see the run directory,
    from which it reads the weights."""
    sampler_timeout: float = attrs.field(default=600.0, validator=number(kind=float, above=True))
    """Seconds that one request to the server may take; beyond it the run ends."""
    tis_above: float = attrs.field(default=0.01, validator=number(kind=float))
    """Mean gap between the log-probabilities of server and trained model, in nats a token,
    above which advantages are weighed by their truncated ratio (TIS)."""
    tis_cap: float = attrs.field(default=2.0, validator=number(kind=float, above=True))
    """What that ratio is at most."""
    max_sampler_gap: float = attrs.field(default=0.2, validator=number(kind=float, above=True))
    """Mean gap, in nats a token, above which the run ends: the server has other weights."""
    max_new_tokens: int = attrs.field(default=256, validator=number(kind=int, low=1))
    """Most tokens that a completion may have; one without an end by then is cut off.
    Of an episode they are those of all turns and observations together."""
    temperature: float = attrs.field(default=1.0, validator=number(kind=float, above=True))
    """Divisor of the logits, where completions are sampled and where they are trained on."""
    top_p: float = attrs.field(default=1.0, validator=_above_share)
    """Share of the probability whose likeliest tokens are sampled from; 1 is all.
    Log-probabilities are those of the whole distribution."""
    top_k: int = attrs.field(default=0, validator=number(kind=int))
    """Number of likeliest tokens that are sampled from; 0 is all."""
    min_p: float = attrs.field(default=0.0, validator=_share)
    """Share of the likeliest token's probability below which no token is sampled; 0 is all."""
    repetition_penalty: float = attrs.field(default=1.0, validator=number(kind=float, above=True))
    """Divisor, while sampling, of the positive logits of tokens that prompt or completion have
    already, and factor of their negative ones; above 1 they come less often (arXiv 1909.05858)."""
    clip: float | None = attrs.field(default=None, validator=_clip_or_none)
    """How far the probability ratio to the policy that sampled may fall below 1 before its
    gradient is cut. By default 0.2; 0.0003 for gspo and luspo, and no bound for cispo."""
    clip_high: float | None = attrs.field(default=None, validator=_above_or_none)
    """How far the ratio may rise above 1. By default as `clip`; where that is not set
    either, 0.2, 0.0004 for gspo and luspo and 4 for cispo. DAPO uses 0.28."""
    updates_per_pass: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Number of optimizer steps in one pass over a rollout; a group's completions stay in one."""
    mask_truncated: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether completions that were cut off have no term in the loss;
    their rewards still count in their group's mean, and they in a mean over completions."""
    missing_eos_penalty: float = attrs.field(default=0.0, validator=number(kind=float))
    """Amount that is subtracted from the reward of a completion that was cut off."""
    overlong_buffer: int = attrs.field(default=0, validator=number(kind=int))
    """Number of last tokens before max_new_tokens within which a completion's reward
    falls, by up to 1 at the last (DAPO, arXiv 2503.14476, equation 13); 0 has no effect."""

    @property
    def kind(self) -> str:
        """Policy loss, a row of `POLICY_KINDS`: by default the clipped ratio of each token."""
        return "ppo"

    @property
    def policy(self) -> PolicyKind:
        """Row of `kind`, with what the settings change of it."""
        return POLICY_KINDS[self.kind]

    @property
    def decoupled(self) -> bool:
        """Whether each reward is normalised by itself (GDPO), and not their sum."""
        return False

    def __attrs_post_init__(self) -> None:
        scored = len(self.reward) + (self.reward_model_path is not None)
        if self.reward_weights is not None and len(self.reward_weights) != scored:
            raise ValueError(
                f"reward_weights must hold a number for each reward function and one for the reward model, {scored} here, "
                f"got {len(self.reward_weights)}: {self.reward_weights}"
            )
        judged = self.env is not None or self.missing_eos_penalty or self.overlong_buffer
        if self.reward_weights and not any(self.reward_weights) and not judged:
            raise ValueError(f"reward_weights={self.reward_weights} leaves nothing to learn from: one must be other than 0")
        if self.overlong_buffer > self.max_new_tokens:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is more than max_new_tokens={self.max_new_tokens}: set fewer tokens"
            )
        if self.on_reward_error != "stop" and not self.reward and self.env is None:
            raise ValueError("on_reward_error='skip' has no effect without reward functions; leave it out, or set reward")
        if self.reward_timeout is not None and not self.reward:
            raise ValueError("reward_timeout has no effect without reward functions; leave it out, or set reward")
        self._check_alone(self.env is None, ("max_turns", "env_timeout"), "without env")
        if self.reference == "moving" and not self.kl_weight:
            raise ValueError(
                "reference='moving' has no effect with kl_weight=0, which reads no reference; set a weight, or leave it out"
            )
        self._check_alone(
            self.reference != "moving", ("reference_sync_steps", "reference_mixup"), f"with reference={self.reference!r}"
        )
        self._check_alone(
            self.sampler == "transformers",
            ("sampler_url", "sampler_timeout", "tis_above", "tis_cap", "max_sampler_gap"),
            "with sampler='transformers', which is the trained model itself",
        )
        if self.sampler == "transformers":
            return
        if self.sampler_url is None:
            raise ValueError(f"sampler={self.sampler!r} needs sampler_url, the address of the running server")
        whole = {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
        for name in (f"{name}={getattr(self, name)}" for name, value in whole.items() if getattr(self, name) != value):
            raise ValueError(
                f"{name} is refused with sampler={self.sampler!r}: the server's log-probabilities could not be compared with "
                "the trained model's, whose distribution is the whole one; leave it out"
            )
        if self.tis_above > self.max_sampler_gap:
            raise ValueError(
                f"tis_above={self.tis_above} is above max_sampler_gap={self.max_sampler_gap}, where the run ends; lower it"
            )

    def _check_alone(self, unread: bool, names: tuple[str, ...], why: str) -> None:
        """Refuse settings that are not read and have another value than their default."""
        fields = attrs.fields_dict(type(self))
        for name in names if unread else ():
            if getattr(self, name) != fields[name].default:
                raise ValueError(f"{name}={getattr(self, name)!r} has no effect {why}; leave it out")


def _check_dual_clip(settings: OnlineSettings, dual_clip: float | None) -> None:
    """Raise ValueError where the bound lies below where the ratio is clipped anyway."""
    _, high = settings.policy.bounds(settings.clip, settings.clip_high)
    if dual_clip is not None and dual_clip <= 1 + high:
        raise ValueError(f"dual_clip={dual_clip} must be above 1 + clip_high, {1 + high:g} here")


@attrs.frozen(kw_only=True)
class GroupSettings(OnlineSettings):
    """Settings of the methods that compare the completions of a prompt: GRPO and RLOO."""

    on_equal_rewards: OnEqualRewards = attrs.field(default="keep", validator=one_of(OnEqualRewards))
    """Whether groups whose rewards are all equal, from which nothing but a KL is learned,
    stay in the mean of the loss ("keep"), are left out ("skip"), or are sampled anew ("resample", DAPO's dynamic sampling) and
    left out where that does not help."""
    max_resamples: int = attrs.field(default=4, validator=number(kind=int, low=1))
    """Number of times that a group is sampled anew, at most."""
    min_group_reward: float | None = attrs.field(default=None, validator=_number_or_none)
    """Least mean reward of a group that is trained on: harder prompts are treated as
    on_equal_rewards has it, "skip" or "resample"."""
    max_group_reward: float | None = attrs.field(default=None, validator=_number_or_none)
    """Greatest mean reward of a group that is trained on: easier prompts are treated as
    on_equal_rewards has it, "skip" or "resample"."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        low, high = self.min_group_reward, self.max_group_reward
        if low is not None and high is not None and low > high:
            raise ValueError(f"min_group_reward={low} is above max_group_reward={high}, so that no group would be trained on")
        if self.on_equal_rewards == "keep" and (low, high) != (None, None):
            name = "min_group_reward" if low is not None else "max_group_reward"
            raise ValueError(f"{name} has no effect with on_equal_rewards='keep'; set that to 'skip' or 'resample'")
        if self.on_equal_rewards != "resample" and self.max_resamples != attrs.fields(GroupSettings).max_resamples.default:
            raise ValueError(
                f"max_resamples={self.max_resamples} has no effect with on_equal_rewards={self.on_equal_rewards!r}; set that "
                "to 'resample'"
            )


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
    arXiv 2511.20347); or tokens weighed by a smooth function of their completion's ratio ("vespo", arXiv 2602.10693)."""
    importance_sampling_level: Level | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(Level)))
    """Whose ratio to the policy that sampled it is: each token's own ("token"), or a completion's, the geometric mean of its
    tokens' ("sequence"). By default the loss type's: a completion's for gspo and luspo."""
    sapo_temperature_pos: float = attrs.field(default=GATE[0], validator=number(kind=float, above=True))
    """Temperature of loss_type=sapo where the advantage is positive:
    the larger, the faster the gradient fades as the ratio leaves 1."""
    sapo_temperature_neg: float = attrs.field(default=GATE[1], validator=number(kind=float, above=True))
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
    off_policy_mask_threshold: float | None = attrs.field(default=None, validator=_above_or_none)
    """Mean fall of a completion's log-probabilities since it was sampled, in nats a token, above which
    a completion with a negative advantage has no term but its KL's (DeepSeek-V3.2, arXiv 2512.02556); by default none is left
    out."""
    dual_clip: float | None = attrs.field(default=None, validator=_above_or_none)
    """What the ratio counts at most where the advantage is negative, above 1 + clip_high;
    by default it has no bound there."""
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
    top_entropy_quantile: float = attrs.field(default=1.0, validator=_share)
    """Share of a rollout's tokens that the policy learns from, those before which it was least certain (arXiv 2506.01939,
    which takes 0.2); others have no term but their KL's, and count in means all the same."""
    num_generations: int = attrs.field(default=8, validator=number(kind=int, low=1))
    """Number of completions of each prompt: a group, within which rewards are compared;
    1 with baseline=none alone."""
    scale_rewards: Scale | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(Scale)))
    """Divisor of the advantages: the standard deviation of the group's rewards ("group"),
    of the rollout's ("batch"), or "none". By default the group's, and none for dr_grpo, with `whiten`, or with another baseline
    than the mean."""
    baseline: Baseline = attrs.field(default="mean", validator=one_of(Baseline))
    """What is subtracted from a reward: the mean of its group ("mean"), of the group's
    others ("leave_one_out"), of the group by number of tokens ("length", OPO, arXiv 2505.23585), or nothing ("none",
    REINFORCE++, arXiv 2501.03262)."""
    whiten: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether a rollout's advantages are scaled to mean 0 and deviation 1 over its tokens
    (REINFORCE++, arXiv 2501.03262)."""
    multi_objective_aggregation: Aggregation = attrs.field(default="sum_then_normalize", validator=one_of(Aggregation))
    """How several rewards become one advantage: their weighted sum is normalised
    ("sum_then_normalize"), or each is normalised within its group, and then their weighted sum over the rollout
    ("normalize_then_sum", GDPO, arXiv 2601.05242). A penalty is then one reward more."""
    kl_weight: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the KL divergence from the reference, a part of the loss;
    0 needs no reference."""
    kl_in_reward: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether that divergence (k1, summed over a completion) is subtracted from the reward, and
    no part of the loss; with baseline=none from each token's, from that token on."""
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
        self._check_alone(not kind.bounded, ("clip", "clip_high", "dual_clip"), f"{form}, which clips nothing")
        self._check_alone(kind.clipped != "gate", ("sapo_temperature_pos", "sapo_temperature_neg"), form)
        self._check_alone(kind.clipped != "gamma", _GAMMA, form)
        own_ratio = kind.clipped in ("gamma", "tokens")
        self._check_alone(own_ratio, ("importance_sampling_level",), f"{form}, whose ratio is a completion's")
        if self.dual_clip is not None and kind.clipped in ("weight", "tokens"):
            raise ValueError(f"dual_clip has no effect with loss_type={self.loss_type!r}, whose ratio clip_high bounds")
        _check_dual_clip(self, self.dual_clip)

    def _check_credit(self) -> None:
        """Refuse combinations of baseline, scale, whitening and the place of the KL."""
        if self.num_generations < 2 and self.baseline != "none":
            raise ValueError(
                f"num_generations must be at least 2, got {self.num_generations}: a reward is compared with its group's; or "
                "set baseline='none'"
            )
        if self.kl_in_reward and not self.kl_weight:
            raise ValueError("kl_in_reward=True has no effect with kl_weight=0; set a weight, or leave it out")
        self._check_alone(self.kl_in_reward, ("kl_estimator",), "with kl_in_reward=True, which subtracts k1")
        if self.whiten and self.scale == "batch":
            raise ValueError("scale_rewards='batch' has no effect with whiten=True, which divides by another deviation")
        if self.kl_in_reward and self.baseline == "none" and not self.policy.per_token:
            raise ValueError(
                f"kl_in_reward=True with baseline='none' gives each token an advantage of its own, and loss_type="
                f"{self.loss_type!r} weighs whole completions: choose another loss_type, or another baseline"
            )

    @property
    def kind(self) -> str:
        """`loss_type`."""
        return self.loss_type

    @property
    def policy(self) -> PolicyKind:
        """Row of `loss_type`, with the ratio of `importance_sampling_level`."""
        row, level = POLICY_KINDS[self.loss_type], self.importance_sampling_level
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


@attrs.frozen(kw_only=True)
class RLOOSettings(GroupSettings):
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

    credit: ClassVar[str] = "leave_one_out"

    num_generations: int = attrs.field(default=4, validator=number(kind=int, low=2))
    """Number of completions of each prompt; the baseline of each is the mean reward of the
    others."""
    kl_weight: float = attrs.field(default=0.05, validator=number(kind=float))
    """Weight of the KL divergence (k1, summed over a completion) from the reference,
    subtracted from the reward; 0 needs no reference."""
    normalize_advantages: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether a rollout's advantages are scaled to mean 0 and deviation 1."""

    @property
    def kind(self) -> str:
        """Clipped ratio of whole completions."""
        return "rloo"


@attrs.frozen(kw_only=True)
class PPOSettings(OnlineSettings):
    """Proximal policy optimisation (arXiv 1707.06347) with a value head.
    Advantages are generalised ones (arXiv 1506.02438).
    """

    credit: ClassVar[str] = "gae"

    kl_weight: float = attrs.field(default=0.05, validator=number(kind=float))
    """Weight of the KL divergence (k1) from the reference, subtracted from each token's reward;
    0 needs no reference."""
    num_iterations: int = attrs.field(default=4, validator=number(kind=int, low=1))
    """Number of passes over each rollout."""
    gamma: float = attrs.field(default=1.0, validator=_share)
    """Discount of a reward for each token that it comes later."""
    lam: float = attrs.field(default=0.95, validator=_share)
    """λ of the advantages: 0 trusts the value head one token ahead, 1 takes the rewards alone."""
    value_weight: float = attrs.field(default=0.1, validator=number(kind=float, above=True))
    """Weight of the value loss beside the policy's."""
    value_clip: float | None = attrs.field(default=0.2, validator=_above_or_none)
    """How far a value may move from the one at sampling before its gradient is cut;
    null does not clip."""
    whiten: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    """Whether a rollout's advantages are scaled to mean 0 and deviation 1."""
    dual_clip: float | None = attrs.field(default=None, validator=_above_or_none)
    """What the ratio counts at most where the advantage is negative, above 1 + clip_high;
    by default it has no bound there (arXiv 1912.09729)."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        _check_dual_clip(self, self.dual_clip)
