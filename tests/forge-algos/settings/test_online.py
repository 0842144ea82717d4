"""Settings of online methods: defaults, choices, refused values; without torch."""

import subprocess
import sys

import attrs
import pytest

from forge_algos import (
    DistillSettings,
    DPOSettings,
    EmbedSettings,
    GRPOSettings,
    KTOSettings,
    MoESettings,
    ORPOSettings,
    PPOSettings,
    RewardSettings,
    RLOOSettings,
    SDFTSettings,
    SimPOSettings,
    SupervisedSettings,
)


def test_defaults_by_method():
    """Group methods need groups, GRPO has no KL, PPO passes over its rollout several times."""
    grpo, rloo, ppo = GRPOSettings(), RLOOSettings(), PPOSettings()
    assert (grpo.num_generations, rloo.num_generations, ppo.num_generations) == (8, 4, 1)
    assert grpo.kl_weight == 0 < rloo.kl_weight == ppo.kl_weight
    assert (grpo.num_iterations, rloo.num_iterations, ppo.num_iterations) == (1, 1, 4)


@pytest.mark.parametrize(
    ("loss", "given", "scale"), [("grpo", None, "group"), ("dr_grpo", None, "none"), ("dr_grpo", "batch", "batch")]
)
def test_what_advantages_are_divided_by(loss, given, scale):
    """By default the group's deviation, none for dr_grpo, or as given."""
    assert GRPOSettings(loss_type=loss, scale_rewards=given).scale == scale


@pytest.mark.parametrize("given", [{"whiten": True}, {"baseline": "leave_one_out"}])
def test_nothing_is_divided_by_twice(given):
    """Whitened advantages, and those of another baseline, are divided by no group's deviation unless asked."""
    assert GRPOSettings(**given).scale == GRPOSettings(baseline="none").scale == "none"
    assert GRPOSettings(**given, scale_rewards="group").scale == "group"


@pytest.mark.parametrize(
    ("kind", "given", "idle"),
    [
        (GRPOSettings, {"loss_type": "kl_cov"}, ("loss_type",)),
        (GRPOSettings, {"loss_type": "kl_cov", "kl_cov_ratio": 0.1}, ("loss_type", "kl_cov_ratio")),
        (GRPOSettings, {"loss_type": "kl_cov", "kl_cov_coef": 2.0}, ("loss_type", "kl_cov_coef")),
        (GRPOSettings, {"loss_type": "gspo", "clip": 0.1}, ("loss_type", "clip")),
        (GRPOSettings, {"loss_type": "sapo", "sapo_temperature_neg": 2.0}, ("loss_type", "sapo_temperature_neg")),
        (GRPOSettings, {"loss_type": "vespo", "vespo_k_pos": 1.0}, ("loss_type", "vespo_k_pos")),
        (GRPOSettings, {"clip": 0.2, "clip_high": 0.28, "dual_clip": 3.0}, ("clip", "clip_high", "dual_clip")),
        (GRPOSettings, {"off_policy_mask_threshold": 0.1}, ("off_policy_mask_threshold",)),
        (RLOOSettings, {"clip_high": 0.3}, ("clip_high",)),
        (PPOSettings, {"num_iterations": 1, "clip": 0.1, "value_clip": 0.5}, ("clip", "value_clip")),
        # The defaults, written out, and kinds that differ from others in the first step too.
        (PPOSettings, {"num_iterations": 1}, ()),
        (GRPOSettings, {"clip": 0.2}, ()),
        *((GRPOSettings, {"loss_type": kind}, ()) for kind in ("grpo", "dr_grpo", "dapo", "luspo", "gpg", "clip_cov")),
        # Another mean, and advantages of tokens, by which whole completions differ.
        (GRPOSettings, {"loss_type": "sapo", "loss_reduction": "tokens"}, ()),
        (GRPOSettings, {"loss_type": "gspo", "top_entropy_quantile": 0.2}, ()),
    ],
)
def test_what_a_single_step_on_a_rollout_leaves_without_effect(kind, given, idle):
    """It is named with one step on each rollout, and with two of either kind nothing is."""
    one = kind(**given)
    assert one.idle == idle
    assert attrs.evolve(one, updates_per_pass=2).idle == attrs.evolve(one, num_iterations=2).idle == ()


def test_one_name_is_a_list_of_one():
    """A single name becomes a list, as a command line gives it."""
    assert GRPOSettings(reward="a:f", reward_weights=2).reward == ("a:f",)
    assert GRPOSettings(reward=["a:f", "b.c:g"], reward_weights=[1, 0.5]).reward_weights == (1, 0.5)
    assert GRPOSettings(reward="a:f", reward_weights=0, missing_eos_penalty=1.0).reward_weights == (0.0,)
    assert len(PPOSettings(reward="a:f", reward_model_path="m", reward_weights=[1, 2]).reward_weights) == 2


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        (GRPOSettings, {"num_generations": 1}, "num_generations must be at least 2"),
        (GRPOSettings, {"num_generations": 1, "loss_type": "online_dpo"}, "got 1: a pair is of two completions$"),
        (RLOOSettings, {"num_generations": 1}, "num_generations must be at least 2"),
        (PPOSettings, {"lam": 1.5}, "lam"),
        (PPOSettings, {"value_weight": 0.0}, "value_weight must be above 0"),
        (PPOSettings, {"value_clip": 0.0}, "value_clip must be above 0"),
        *(
            (each, {"temperature": 1e-38}, "temperature must be at least 1e-06")
            for each in (GRPOSettings, SDFTSettings, EmbedSettings)
        ),
        (GRPOSettings, {"top_p": 0.0}, "top_p"),
        (GRPOSettings, {"top_p": 1.1}, "top_p"),
        (GRPOSettings, {"min_p": 1.1}, "min_p"),
        (GRPOSettings, {"entropy_target": 1.0}, "entropy_target=1.0 has no effect with use_adaptive_entropy=False"),
        (
            GRPOSettings,
            {"use_adaptive_entropy": True, "entropy_coef_min": 2.0},
            "entropy_coef_min=2.0 is above entropy_coef_max",
        ),
        (GRPOSettings, {"use_adaptive_entropy": True, "entropy_coef": 2.0}, "entropy_coef=2.0 is where .* begins.*max=1.0"),
        (GRPOSettings, {"use_adaptive_entropy": True, "entropy_coef_min": 0.1}, "entropy_coef=0.0 is where .*min=0.1"),
        (GRPOSettings, {"vespo_k_pos": 1.0}, "vespo_k_pos=1.0 has no effect with loss_type='dapo'"),
        (
            GRPOSettings,
            {"loss_type": "vespo", "clip": 0.1},
            "clip=0.1 has no effect with loss_type='vespo', which clips nothing",
        ),
        (
            GRPOSettings,
            {"loss_type": "vespo", "importance_sampling_level": "token"},
            "importance_sampling_level='token' has no",
        ),
        (GRPOSettings, {"loss_type": "vespo", "vespo_lambda_pos": 0.0}, "vespo_lambda_pos must be above 0"),
        (GRPOSettings, {"top_entropy_quantile": 1.1}, "top_entropy_quantile"),
        (GRPOSettings, {"top_entropy_quantile": -0.1}, "top_entropy_quantile"),
        (GRPOSettings, {"min_p": -0.1}, "min_p"),
        (RLOOSettings, {"repetition_penalty": 0.0}, "repetition_penalty"),
        (GRPOSettings, {"clip": 1.0}, "clip must be"),
        (GRPOSettings, {"reward": "nocolon"}, "'file.py:function', got 'nocolon'"),
        (GRPOSettings, {"reward": ["a:f", "a:f"]}, "twice"),
        (
            GRPOSettings,
            {"reward": ["a:f", "a:g"], "reward_weights": [0, 0]},
            "leaves nothing to learn from: one must be other than 0",
        ),
        (GRPOSettings, {"reward": "a:f", "reward_weights": [1, 2]}, "one for the reward model, 1 here, got 2"),
        (GRPOSettings, {"on_reward_error": "skip"}, "no effect without reward functions"),
        (GRPOSettings, {"loss_type": "ppo"}, "loss_type"),
        (GRPOSettings, {"loss_type": "gspo", "dual_clip": 1.0}, r"dual_clip=1.0 must be above 1 \+ clip_high, 1.0004 here"),
        (GRPOSettings, {"loss_type": "sapo", "clip": 0.1}, "clip=0.1 has no effect with loss_type='sapo', which clips nothing"),
        (
            GRPOSettings,
            {"multi_objective_aggregation": "normalize_then_sum", "scale_rewards": "none"},
            "scale_rewards='none' has no effect with multi_objective_aggregation='normalize_then_sum'",
        ),
        (
            GRPOSettings,
            {"multi_objective_aggregation": "normalize_then_sum", "reward_clip_range": (0.0, 1.0)},
            "which adds up no rewards as they are",
        ),
        (GRPOSettings, {"sapo_temperature_neg": 2.0}, "sapo_temperature_neg=2.0 has no effect with loss_type='dapo'"),
        (GRPOSettings, {"loss_type": "cispo", "dual_clip": 9.0}, "dual_clip has no effect with loss_type='cispo'"),
        (GRPOSettings, {"loss_type": "gmpo", "dual_clip": 9.0}, "dual_clip has no effect with loss_type='gmpo'"),
        (
            GRPOSettings,
            {"loss_type": "gmpo", "importance_sampling_level": "token"},
            "importance_sampling_level='token' has no effect with loss_type='gmpo', whose ratio is a completion's",
        ),
        (PPOSettings, {"dual_clip": 1.2}, r"dual_clip=1.2 must be above 1 \+ clip_high, 1.2 here"),
        (GRPOSettings, {"kl_in_reward": True}, "kl_in_reward=True has no effect with kl_weight=0"),
        (
            GRPOSettings,
            {"kl_in_reward": True, "kl_weight": 0.1, "kl_estimator": "unbiased"},
            "kl_estimator='unbiased' has no effect with kl_in_reward=True",
        ),
        (GRPOSettings, {"whiten": True, "scale_rewards": "batch"}, "scale_rewards='batch' has no effect with whiten=True"),
        (GRPOSettings, {"baseline": "none", "scale_rewards": "group"}, "scale_rewards='group' with baseline='none' divides"),
        (
            GRPOSettings,
            {"baseline": "none", "scale_rewards": "batch", "num_generations": 1},
            "they would count 10,000-fold; set whiten=True",
        ),
        (
            GRPOSettings,
            {"scale_rewards": "nonzero", "kl_in_reward": True, "kl_weight": 0.1},
            "scale_rewards='nonzero' has no effect with kl_in_reward=True",
        ),
        (
            GRPOSettings,
            {"kl_in_reward": True, "kl_weight": 0.1, "baseline": "none", "loss_type": "gspo"},
            "loss_type='gspo' weighs whole completions: choose another loss_type, or another baseline",
        ),
        (
            GRPOSettings,
            {"whiten": True, "multi_objective_aggregation": "normalize_then_sum"},
            "whiten=True has no effect with multi_objective_aggregation='normalize_then_sum'",
        ),
        (GRPOSettings, {"kl_estimator": "unbiased"}, "kl_estimator='unbiased' has no effect with kl_weight=0"),
        (GRPOSettings, {"reference": "moving"}, "reference='moving' has no effect with kl_weight=0, which reads no reference"),
        (RLOOSettings, {"reference": "moving", "kl_weight": 0.0}, "reference='moving' has no effect with kl_weight=0"),
        (GRPOSettings, {"reward_clip_range": (1.0,)}, "reward_clip_range must be two numbers, the lesser first, got"),
        (RLOOSettings, {"reward_clip_range": [1, 0]}, r"reward_clip_range must be two numbers, the lesser first, got \[1, 0\]"),
        (PPOSettings, {"reference_mixup": 0.5}, "reference_mixup=0.5 has no effect with reference='initial'"),
        (RLOOSettings, {"reference": "stored"}, "'reference' must be in \\('initial', 'moving'\\)"),
        (GRPOSettings, {"max_resamples": 2}, "max_resamples=2 has no effect with on_equal_rewards='keep'"),
        (RLOOSettings, {"min_group_reward": 0.1}, "min_group_reward has no effect with on_equal_rewards='keep'"),
        (
            GRPOSettings,
            {"on_equal_rewards": "skip", "min_group_reward": 0.9, "max_group_reward": 0.1},
            "min_group_reward=0.9 is above max_group_reward=0.1",
        ),
        (PPOSettings, {"max_new_tokens": 8, "overlong_buffer": 9}, "overlong_buffer=9 is more than max_new_tokens=8"),
        (GRPOSettings, {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
    ],
)
def test_impossible_values_are_refused(kind, given, message):
    """Impossible values are refused with the field's name."""
    with pytest.raises((ValueError, TypeError), match=message):
        kind(**given)


@pytest.mark.slow
def test_settings_need_no_torch():
    """Settings load without torch, for a help page."""
    code = "import sys, forge_algos; forge_algos.PPOSettings(), forge_algos.GRPOSettings(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


LOSSES = [
    *(GRPOSettings, RLOOSettings, PPOSettings, SDFTSettings, EmbedSettings, SupervisedSettings, DistillSettings),
    *(DPOSettings, KTOSettings, ORPOSettings, SimPOSettings, RewardSettings, MoESettings),
]


def numbers(kind):
    """Names of the settings of a class that are a number which is no whole one."""
    return [name for name, field in attrs.fields_dict(kind).items() if field.type in (float, float | None)]


@pytest.mark.parametrize("kind", LOSSES)
@pytest.mark.parametrize("value", [1e300, 10**400])
def test_a_number_that_no_loss_can_hold(kind, value):
    """It is refused by the name of its setting: infinity times 0 was a loss that is not a number, in a step."""
    assert numbers(kind)
    for name in numbers(kind):
        with pytest.raises(ValueError, match=f"{name} must be "):
            kind(**{name: value})


@pytest.mark.parametrize(
    ("kind", "name"),
    [(GRPOSettings, "sapo_temperature_pos"), (GRPOSettings, "sapo_temperature_neg"), (DPOSettings, "discopop_tau")]
    + [(each, "beta") for each in (DPOSettings, KTOSettings, ORPOSettings, SimPOSettings)],
)
def test_a_number_by_which_no_loss_can_be_divided(kind, name):
    """So is one that float32 takes for 0, or whose inverse has no square there."""
    for value in (1e-300, 1e-30, 0.0):
        with pytest.raises(ValueError, match=f"{name} must be at least 1e-0"):
            kind(**{name: value})
