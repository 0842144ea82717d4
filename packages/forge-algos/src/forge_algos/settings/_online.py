"""Settings of the online methods: what all share, RLOO and PPO. Reading them loads no torch.

Shared by all (GRPO's are in `_grpo.py`): how completions are sampled, what rewards them, how often a rollout is used, and what
happens to completions that were cut off or could not be scored.
"""

from typing import ClassVar, Literal

import attrs

from forge_algos.settings._online_validators import (
    above_or_none,
    above_share,
    as_tuple,
    check_class,
    check_range,
    check_rewards,
    check_url,
    check_weights,
    clip_or_none,
    number_or_none,
    share,
)
from forge_algos.settings._policy_kinds import POLICY_KINDS, PolicyKind
from forge_algos.settings._validators import logits_divisor, number, one_of

OnRewardError = Literal["stop", "skip"]
OnEqualRewards = Literal["keep", "skip", "resample"]
SamplerKind = Literal["transformers", "vllm", "sglang"]
PolicyReference = Literal["initial", "moving"]


@attrs.frozen(kw_only=True)
class OnlineSettings:
    """Settings that PPO, GRPO and RLOO share; some have another default in one of them."""

    credit: ClassVar[str]
    """How rewards become advantages: a row of `forge_algos.online._credit.CREDITS`."""
    num_generations: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Number of completions of each prompt."""
    kl_weight: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the KL divergence from the reference; 0 needs no reference."""
    kl_target: float | None = attrs.field(default=None, validator=above_or_none)
    """KL divergence (k1) from the reference, in nats a token, that `kl_weight` steers for: after each rollout the weight rises
    where its completions are further away, and falls where they are nearer (arXiv 1909.08593); by default it stays."""
    kl_horizon: int = attrs.field(default=10_000, validator=number(kind=int, low=1))
    """Number of completions in which kl_target changes the weight by a fifth, at most."""
    reference: PolicyReference = attrs.field(default="initial", validator=one_of(PolicyReference))
    """Reference of that divergence: the model that training starts from ("initial"),
    or one that follows the trained model ("moving"; TR-DPO, arXiv 2404.09656)."""
    reference_sync_steps: int = attrs.field(default=512, validator=number(kind=int, low=1))
    """Number of steps after which reference=moving moves towards the trained model, each time."""
    reference_mixup: float = attrs.field(default=0.6, validator=above_share)
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
    reward_timeout: float | None = attrs.field(default=None, validator=above_or_none)
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
    temperature: float = attrs.field(default=1.0, validator=logits_divisor)
    """Divisor of the logits, where completions are sampled and where they are trained on; at least 1e-6."""
    top_p: float = attrs.field(default=1.0, validator=above_share)
    """Share of the probability whose likeliest tokens are sampled from; 1 is all.
    Log-probabilities are those of the whole distribution."""
    top_k: int = attrs.field(default=0, validator=number(kind=int))
    """Number of likeliest tokens that are sampled from; 0 is all."""
    min_p: float = attrs.field(default=0.0, validator=share)
    """Share of the likeliest token's probability below which no token is sampled; 0 is all."""
    repetition_penalty: float = attrs.field(default=1.0, validator=number(kind=float, above=True))
    """Divisor, while sampling, of the positive logits of tokens that prompt or completion have
    already, and factor of their negative ones; above 1 they come less often (arXiv 1909.05858)."""
    clip: float | None = attrs.field(default=None, validator=clip_or_none)
    """How far the probability ratio to the policy that sampled may fall below 1 before its
    gradient is cut. By default 0.2; 0.0003 for gspo and luspo, and no bound for cispo. How far the
    probability of a token may move for dppo_tv, 0.15 by default, and its divergence for dppo_kl, 0.05."""
    clip_high: float | None = attrs.field(default=None, validator=above_or_none)
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

    @property
    def paired(self) -> bool:
        """Whether best and worst completion of a prompt are trained on as a pair (online DPO)."""
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
        if self.kl_target is not None and not self.kl_weight:
            raise ValueError(
                f"kl_target={self.kl_target} has no effect with kl_weight=0, where the weight begins; set one, or leave it out"
            )
        self._check_alone(self.kl_target is None, ("kl_horizon",), "without kl_target")
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

    @property
    def steps_of_rollout(self) -> int:
        """Number of optimizer steps on one rollout."""
        return self.num_iterations * self.updates_per_pass

    @property
    def idle(self) -> tuple[str, ...]:
        """Names of settings that change nothing because each rollout is learned from in one step.

        They read the ratio to the policy that sampled, which is 1 in that step.

        >>> RLOOSettings(clip=0.1).idle, RLOOSettings(clip=0.1, updates_per_pass=2).idle
        (('clip',), ())
        """
        return () if self.steps_of_rollout > 1 else self._read_later()

    def _read_later(self) -> tuple[str, ...]:
        """Return what is no default and acts from the second step on a rollout on."""
        low, high = self.policy.clip
        if not self.policy.bounded or self.policy.bounds(self.clip, self.clip_high) == (low, high):
            return ()
        return tuple(name for name in ("clip", "clip_high") if getattr(self, name) is not None)

    def _check_alone(self, unread: bool, names: tuple[str, ...], why: str) -> None:
        """Refuse settings that are not read and have another value than their default."""
        for name in changed(self, names) if unread else ():
            raise ValueError(f"{name}={getattr(self, name)!r} has no effect {why}; leave it out")


def changed(settings: OnlineSettings, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return those of `names` that have another value than their default."""
    fields = attrs.fields_dict(type(settings))
    return tuple(name for name in names if getattr(settings, name) != fields[name].default)


def check_dual_clip(settings: OnlineSettings, dual_clip: float | None) -> None:
    """Raise ValueError where the bound lies below where the ratio is clipped anyway."""
    _, high = settings.policy.bounds(settings.clip, settings.clip_high)
    if dual_clip is not None and settings.policy.diverges and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} must be above 1, which every ratio is at first")
    if dual_clip is not None and not settings.policy.diverges and dual_clip <= 1 + high:
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
    min_group_reward: float | None = attrs.field(default=None, validator=number_or_none)
    """Least mean reward of a group that is trained on: harder prompts are treated as
    on_equal_rewards has it, "skip" or "resample"."""
    max_group_reward: float | None = attrs.field(default=None, validator=number_or_none)
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
    gamma: float = attrs.field(default=1.0, validator=share)
    """Discount of a reward for each token that it comes later."""
    lam: float = attrs.field(default=0.95, validator=share)
    """λ of the advantages: 0 trusts the value head one token ahead, 1 takes the rewards alone."""
    value_weight: float = attrs.field(default=0.1, validator=number(kind=float, above=True))
    """Weight of the value loss beside the policy's."""
    value_clip: float | None = attrs.field(default=0.2, validator=above_or_none)
    """How far a value may move from the one at sampling before its gradient is cut;
    null does not clip."""
    whiten: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    """Whether a rollout's advantages are scaled to mean 0 and deviation 1."""
    dual_clip: float | None = attrs.field(default=None, validator=above_or_none)
    """What the ratio counts at most where the advantage is negative, above 1 + clip_high;
    by default it has no bound there (arXiv 1912.09729)."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        check_dual_clip(self, self.dual_clip)

    def _read_later(self) -> tuple[str, ...]:
        return super()._read_later() + changed(self, ("value_clip", "dual_clip"))
