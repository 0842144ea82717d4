"""The settings of the online methods: PPO, GRPO and RLOO; torch is not loaded to read them.

What all three share: how completions are sampled, what rewards them, how far a rollout is used, and what becomes of completions
that were cut off or could not be scored.
"""

from typing import Any, Literal

import attrs

from forge_algos.settings._validators import number, one_of

GRPOLoss = Literal["grpo", "dr_grpo", "dapo", "bnpo"]
Scale = Literal["group", "batch", "none"]
OnRewardError = Literal["stop", "skip"]
OnEqualRewards = Literal["keep", "skip"]

# Any: a field with a default of one type and a validator made for another is more than the checker follows.
_share: Any = attrs.validators.and_(number(kind=float), attrs.validators.le(1))
_above_share: Any = attrs.validators.and_(number(kind=float, above=True), attrs.validators.le(1))
_above_or_none: Any = attrs.validators.optional(number(kind=float, above=True))


def _tuple(value: Any) -> Any:
    return (value,) if isinstance(value, str | int | float) else tuple(value) if isinstance(value, list) else value


def _check_rewards(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, tuple) or not all(isinstance(name, str) for name in value):
        raise TypeError(f"{field.name} must be a list of 'package.module:function', got {value!r}")
    for name in value:
        module, colon, function = name.partition(":")
        if not module or not colon or not function:
            raise ValueError(f"{field.name} must name functions as 'package.module:function', got {name!r}")
    if len(set(value)) != len(value):
        raise ValueError(f"{field.name} names a function twice: {value!r}; give it a larger weight instead")


def _check_weights(_instance: Any, field: Any, value: Any) -> None:
    if not isinstance(value, tuple):
        raise TypeError(f"{field.name} must be a list of numbers, got {value!r}")
    for weight in value:
        number(kind=float, low=float("-inf"))(_instance, field, weight)


@attrs.frozen(kw_only=True)
class OnlineSettings:
    """What PPO, GRPO and RLOO share; some have another default in one of them."""

    num_generations: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Completions of each prompt."""
    kl_weight: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the KL divergence from the reference; 0 needs no reference."""
    num_iterations: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Passes over each rollout."""
    reward: tuple[str, ...] = attrs.field(default=(), converter=_tuple, validator=_check_rewards)
    """Functions that reward a completion, as "package.module:function"; their weighted sum is the reward."""
    reward_weights: tuple[float, ...] | None = attrs.field(
        default=None, converter=_tuple, validator=attrs.validators.optional(_check_weights)
    )
    """A weight for each of `reward`, and then for the reward model where there is one; 1 for each by default."""
    reward_model_path: str | None = attrs.field(
        default=None, validator=attrs.validators.optional(attrs.validators.instance_of(str))
    )
    """A sequence classification model with one label, whose score is a further reward."""
    on_reward_error: OnRewardError = attrs.field(default="stop", validator=one_of(OnRewardError))
    """What a reward function that raises, or gives no number, does: stop the run, or leave those completions unscored."""
    max_new_tokens: int = attrs.field(default=256, validator=number(kind=int, low=1))
    """Tokens that a completion may have; one that has found no end by then is cut off."""
    temperature: float = attrs.field(default=1.0, validator=number(kind=float, above=True))
    """Divides the logits, where completions are sampled and where they are trained on."""
    top_p: float = attrs.field(default=1.0, validator=_above_share)
    """Sample from the likeliest tokens that hold this share of the probability; 1 is all of them. Log-probabilities are
    those of the whole distribution."""
    top_k: int = attrs.field(default=0, validator=number(kind=int))
    """Sample from this many likeliest tokens; 0 is all of them."""
    clip: float = attrs.field(default=0.2, validator=number(kind=float, above=True, below=1.0))
    """How far the probability ratio to the policy that sampled may fall below 1 before it stops to teach."""
    clip_high: float | None = attrs.field(default=None, validator=_above_or_none)
    """How far it may rise above 1; as `clip` by default. DAPO uses 0.28."""
    updates_per_pass: int = attrs.field(default=1, validator=number(kind=int, low=1))
    """Optimizer steps into which one pass over a rollout is cut; a group's completions stay in one."""
    mask_truncated: bool = attrs.field(default=False, validator=attrs.validators.instance_of(bool))
    """Whether completions that were cut off are not trained on; their rewards still count in their group's mean."""
    missing_eos_penalty: float = attrs.field(default=0.0, validator=number(kind=float))
    """Taken off the reward of a completion that was cut off."""

    def __attrs_post_init__(self) -> None:
        scored = len(self.reward) + (self.reward_model_path is not None)
        if self.reward_weights is not None and len(self.reward_weights) != scored:
            raise ValueError(
                f"reward_weights must hold a number for each reward function and one for the reward model, {scored} here, "
                f"got {len(self.reward_weights)}: {self.reward_weights}"
            )
        if self.on_reward_error != "stop" and not self.reward:
            raise ValueError("on_reward_error='skip' has no effect without reward functions; leave it out, or set reward")


@attrs.frozen(kw_only=True)
class GRPOSettings(OnlineSettings):
    """Group-relative policy optimisation (arXiv 2402.03300) and its variants.

    >>> GRPOSettings(loss_type="dr_grpo").scale
    'none'
    """

    loss_type: GRPOLoss = attrs.field(default="dapo", validator=one_of(GRPOLoss))
    """What is averaged: completions' means over their tokens ("grpo"), their sums over max_new_tokens ("dr_grpo", arXiv
    2503.20783), or all tokens of the step ("dapo", arXiv 2503.14476; "bnpo" is the same here, where a step's cut changes nothing)."""
    num_generations: int = attrs.field(default=8, validator=number(kind=int, low=2))
    """Completions of each prompt: a group, within which rewards are compared."""
    scale_rewards: Scale | None = attrs.field(default=None, validator=attrs.validators.optional(one_of(Scale)))
    """Divide the advantages by the standard deviation of the group's rewards, of the rollout's ("batch"), or by none. By default
    by the group's, and by none for dr_grpo."""
    kl_weight: float = attrs.field(default=0.0, validator=number(kind=float))
    """Weight of the KL divergence (k3) from the reference, a part of the loss; 0 needs no reference."""
    on_equal_rewards: OnEqualRewards = attrs.field(default="keep", validator=one_of(OnEqualRewards))
    """Whether groups whose rewards are all equal, which teach nothing, are trained on (they count in the mean) or left out."""

    @property
    def scale(self) -> Scale:
        """`scale_rewards`, or what stands for it by default."""
        return self.scale_rewards or ("none" if self.loss_type == "dr_grpo" else "group")


@attrs.frozen(kw_only=True)
class RLOOSettings(OnlineSettings):
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740)."""

    num_generations: int = attrs.field(default=4, validator=number(kind=int, low=2))
    """Completions of each prompt: each one's baseline is the mean reward of the others."""
    kl_weight: float = attrs.field(default=0.05, validator=number(kind=float))
    """Weight of the KL divergence (k1, summed over a completion) from the reference, taken off the reward; 0 needs no reference."""
    on_equal_rewards: OnEqualRewards = attrs.field(default="keep", validator=one_of(OnEqualRewards))
    """Whether groups whose rewards are all equal are trained on (the KL alone teaches then) or left out."""


@attrs.frozen(kw_only=True)
class PPOSettings(OnlineSettings):
    """Proximal policy optimisation (arXiv 1707.06347) with a value head and generalised advantages (arXiv 1506.02438)."""

    kl_weight: float = attrs.field(default=0.05, validator=number(kind=float))
    """Weight of the KL divergence (k1) from the reference, taken off each token's reward; 0 needs no reference."""
    num_iterations: int = attrs.field(default=4, validator=number(kind=int, low=1))
    """Passes over each rollout."""
    gamma: float = attrs.field(default=1.0, validator=_share)
    """Discount of rewards a token later."""
    lam: float = attrs.field(default=0.95, validator=_share)
    """λ of the advantages: 0 trusts the value head one token ahead, 1 waits for the rewards themselves."""
    value_weight: float = attrs.field(default=0.1, validator=number(kind=float, above=True))
    """Weight of the value loss beside the policy's."""
    value_clip: float | None = attrs.field(default=0.2, validator=_above_or_none)
    """How far a value may leave the one at sampling before it stops to learn; null does not clip."""
    whiten: bool = attrs.field(default=True, validator=attrs.validators.instance_of(bool))
    """Whether a rollout's advantages are brought to mean 0 and deviation 1."""
