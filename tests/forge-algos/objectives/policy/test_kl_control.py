"""A weight of the KL that steers for a target is verl's, and goes on from what it says of itself."""

import numpy as np
import pytest
from hypothesis import given, strategies as st

from forge_algos import GRPO, PPO, RLOO, GRPOSettings, PPOSettings, RLOOSettings

from ...digits import digit_model, rollout

METHODS = [(PPO, PPOSettings, {}), (RLOO, RLOOSettings, {}), (GRPO, GRPOSettings, {"kl_in_reward": True})]
STEERED = {"kl_weight": 0.3, "kl_target": 0.05, "kl_horizon": 40}


class AdaptiveKLController:
    """verl/trainer/ppo/core_algos.py (verl-project/verl, Apache-2.0, commit 1dda039b), as it is there."""

    def __init__(self, init_kl_coef, target_kl, horizon):
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl, n_steps):
        target = self.target
        proportional_error = np.clip(current_kl / target - 1, -0.2, 0.2)
        mult = 1 + proportional_error * n_steps / self.horizon
        self.value *= mult


@pytest.mark.parametrize(("objective", "settings", "own"), METHODS)
@given(kls=st.lists(st.floats(-0.1, 0.2), min_size=1, max_size=6), number=st.integers(1, 150))
def test_the_weight_is_verls(objective, settings, own, kls, number):
    """After any rollouts, also of a KL below 0; and with what `state` returned another goes on alike."""
    steered = objective(settings(**STEERED, **own))
    theirs = AdaptiveKLController(0.3, 0.05, 40)
    assert steered.kl_weight == 0.3
    for kl in kls:
        again = objective(settings(**STEERED, **own))
        again.resume(steered.state())
        for each in (steered, again):
            each.after_rollout(kl, number)
            each.after_step({"kl": 9.0})
        theirs.update(kl, number)
        assert steered.kl_weight == again.kl_weight == pytest.approx(theirs.value, rel=1e-12)


def test_it_stays_above_nothing():
    """A rollout of many more completions than the horizon leaves a tenth of it; one of none, and a weight that stays, all."""
    steered = PPO(PPOSettings(**STEERED))
    steered.after_rollout(-1.0, 10_000)
    assert steered.kl_weight == pytest.approx(0.03)
    steered.after_rollout(0.0, 0)
    assert steered.kl_weight == pytest.approx(0.03)
    plain = PPO(PPOSettings(kl_weight=0.3))
    plain.after_rollout(9.0, 10)
    assert (plain.kl_weight, plain.state()) == (0.3, {})


def test_what_it_follows_is_a_mean_over_completions():
    """Of the mean k1 of each one's tokens, as verl has it; NaN where nothing was measured."""
    made = rollout(digit_model(1, size=0.3), RLOOSettings(max_new_tokens=6), reference=digit_model(2, size=0.3))
    k1 = made.old_logps - made.ref_logps
    expected = [k1[a:b].mean() for a, b in zip(made.starts[:-1], made.starts[1:], strict=True)]
    np.testing.assert_allclose(made.completion_kl, expected, rtol=1e-5)
    assert np.isnan(rollout(digit_model(), GRPOSettings(num_generations=2, max_new_tokens=4)).completion_kl).all()


def test_what_has_no_effect_is_refused():
    """A target without a weight to begin with, or of a KL in the loss; a horizon without a target."""
    for settings, own, says in (
        (PPOSettings, {"kl_weight": 0.0, "kl_target": 0.1}, "kl_target=0.1 has no effect with kl_weight=0"),
        (GRPOSettings, {"kl_weight": 0.1, "kl_target": 0.1}, "kl_target=0.1 has no effect with kl_in_reward=False"),
        (RLOOSettings, {"kl_horizon": 5}, "kl_horizon=5 has no effect without kl_target"),
        (GRPOSettings, {"loss_type": "online_dpo", **STEERED}, "kl_in_reward=False"),
    ):
        with pytest.raises(ValueError, match=says):
            settings(**own)
