"""PPO, GRPO and RLOO learn from verifiable rewards.
Three seeds and three tasks are in `benchmarks/online_learning.py`.
"""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from forge_algos import GRPO, PPO, RLOO, SFT, GRPOSettings, OptimizerSettings, PPOSettings, RLOOSettings, adamw, schedule, train
from forge_algos.online import attach_value_head, rollout_batches

from ...lanes import ci_keeps
from ..digits import ASK, END, START, copied, digit_model, rollout, sampler
from ..oracle import pack

pytestmark = pytest.mark.slow

METHODS = {
    "ppo": (PPO, PPOSettings(num_generations=8, max_new_tokens=3, kl_weight=0.0, num_iterations=2, value_weight=0.5, lam=1.0)),
    "grpo": (GRPO, GRPOSettings(num_generations=8, max_new_tokens=3, num_iterations=2)),
    "rloo": (RLOO, RLOOSettings(num_generations=8, max_new_tokens=3, kl_weight=0.0, num_iterations=2)),
}


def one_digit_prompts(number, seed):
    """Return prompts of one digit."""
    digits = np.random.default_rng(seed).integers(0, 10, number)
    ids = [np.array([START, digit, ASK], np.int32) for digit in digits]
    return [SimpleNamespace(input_ids=i, prompt=str(d), columns={"digit": int(d)}) for i, d in zip(ids, digits, strict=True)]


def train_on(model, objective, steps, rate=3e-3):
    settings = OptimizerSettings(learning_rate=rate, lr_scheduler="constant")
    optimizer = adamw(model, settings)
    for _ in train(model, steps, objective=objective, optimizer=optimizer, scheduler=schedule(optimizer, settings, 100)):
        pass


@pytest.fixture(scope="module")
def half_trained_model():
    """Return a model that has seen answers of one or two digits, two fifths of them right."""
    random = np.random.default_rng(0)
    steps = []
    for _ in range(60):
        rows = []
        for digit in random.integers(0, 10, 64):
            answer = [digit] if random.random() < 0.4 else random.integers(0, 10, random.integers(1, 3))
            ids = np.array([START, digit, ASK, *answer, END])
            rows.append((ids, np.where(np.arange(len(ids)) < 3, -100, ids)))
        steps.append([pack(rows)])
    model = digit_model()
    train_on(model, SFT(), steps, rate=5e-3)
    return model


@pytest.mark.parametrize("name", ci_keeps(["grpo"], METHODS))
def test_copying_a_digit(half_trained_model, name):
    """From less than a third of sampled answers right to more than nine tenths."""
    kind, settings = METHODS[name]
    model = copy.deepcopy(half_trained_model)
    if name == "ppo":
        attach_value_head(model)
    draw = sampler(model, batch_tokens=4096)
    rewards = []

    def steps():
        for number in range(60):
            made = rollout(
                model,
                settings,
                asked=one_digit_prompts(20, number),
                reward=copied,
                seed=number,
                sampler=draw,
                max_tokens=300,
            )
            rewards.append(made.figures()["reward"])
            if np.mean(rewards[-3:]) > 0.95:
                return
            yield from rollout_batches(made, max_tokens=300, passes=2)

    train_on(model, kind(settings), steps())
    assert rewards[0] < 1 / 3
    # What it has learned, on answers that nothing was learned from.
    assert (
        rollout(
            model,
            settings,
            asked=one_digit_prompts(60, 1000),
            reward=copied,
            seed=1000,
            sampler=draw,
            max_tokens=300,
        ).figures()["reward"]
        > 0.9
    )
