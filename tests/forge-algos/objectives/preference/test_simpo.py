"""SimPO: log-probabilities a token, a margin, no reference."""

import numpy as np
import pytest

from forge_algos import SimPO, SimPOSettings, evaluate

from ...oracle import make
from ...preferences import pair_batch, some_pairs, token_logps

PAIRS = some_pairs(5, seed=51)


def test_the_loss_and_its_figures():
    """β, γ and the smoothing arrive; rewards are β times the log-probability a token."""
    model = make()
    objective = SimPO(SimPOSettings(beta=3.0, gamma=0.4, label_smoothing=0.1))
    found = evaluate(model, [pair_batch(PAIRS[:2]), pair_batch(PAIRS[2:])], objective=objective)
    rewards = 3.0 * np.array([[token_logps(model, p, y).mean().item() for y in both] for p, *both in PAIRS])
    x = rewards[:, 0] - rewards[:, 1] - 0.4
    assert found.loss == pytest.approx((0.9 * np.log1p(np.exp(-x)) + 0.1 * np.log1p(np.exp(x))).mean(), rel=1e-5)
    assert found.figures == pytest.approx(
        {
            "accuracy": (rewards[:, 0] > rewards[:, 1]).mean(),
            "margin": (rewards[:, 0] - rewards[:, 1]).mean(),
            "chosen_reward": rewards[:, 0].mean(),
            "rejected_reward": rewards[:, 1].mean(),
        },
        rel=1e-4,
    )
    assert (found.loss_count, SimPO().unit) == (5, "pairs")
