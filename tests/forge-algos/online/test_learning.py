"""PPO, GRPO and RLOO learn what can be verified; three seeds and three tasks of it are `benchmarks/online_learning.py`."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from forge_algos import GRPO, PPO, RLOO, SFT, GRPOSettings, OptimizerSettings, PPOSettings, RLOOSettings, adamw, schedule, train
from forge_algos.online import attach_value_head, rollout_batches

from ..oracle import pack
from ..toys import ASK, END, START, copied, rollout, sampler, toy

METHODS = {
    "ppo": (PPO, PPOSettings(num_generations=8, max_new_tokens=3, kl_weight=0.0, num_iterations=2, value_weight=0.5, lam=1.0)),
    "grpo": (GRPO, GRPOSettings(num_generations=8, max_new_tokens=3, num_iterations=2)),
    "rloo": (RLOO, RLOOSettings(num_generations=8, max_new_tokens=3, kl_weight=0.0, num_iterations=2)),
}


def asked(number, seed):
    """Prompts of one digit."""
    digits = np.random.default_rng(seed).integers(0, 10, number)
    ids = [np.array([START, digit, ASK], np.int32) for digit in digits]
    return [SimpleNamespace(input_ids=i, prompt=str(d), columns={"digit": int(d)}) for i, d in zip(ids, digits, strict=True)]


def teach(model, objective, steps, rate=3e-3):
    settings = OptimizerSettings(learning_rate=rate, lr_scheduler="constant")
    optimizer = adamw(model, settings)
    for _ in train(model, steps, objective=objective, optimizer=optimizer, scheduler=schedule(optimizer, settings, 100)):
        pass


@pytest.fixture(scope="module")
def beginner():
    """A model that has seen answers of a digit or two, two fifths of them right."""
    random = np.random.default_rng(0)
    steps = []
    for _ in range(60):
        rows = []
        for digit in random.integers(0, 10, 64):
            answer = [digit] if random.random() < 0.4 else random.integers(0, 10, random.integers(1, 3))
            ids = np.array([START, digit, ASK, *answer, END])
            rows.append((ids, np.where(np.arange(len(ids)) < 3, -100, ids)))
        steps.append([pack(rows)])
    model = toy()
    teach(model, SFT(), steps, rate=5e-3)
    return model


@pytest.mark.parametrize("name", METHODS)
def test_copying_a_digit(beginner, name):
    """From less than a third right to more than nine tenths of sampled answers."""
    kind, settings = METHODS[name]
    model = copy.deepcopy(beginner)
    if name == "ppo":
        attach_value_head(model)
    draw = sampler(model, batch_tokens=4096)
    rewards = []

    def steps():
        for number in range(60):
            made = rollout(model, settings, asked=asked(20, number), reward=copied, seed=number, sampler=draw, max_tokens=300)
            rewards.append(made.figures()["reward"])
            if np.mean(rewards[-3:]) > 0.95:
                return
            yield from rollout_batches(made, max_tokens=300, passes=2)

    teach(model, kind(settings), steps())
    assert rewards[0] < 1 / 3
    # What it has learned, on answers that nothing was learned from.
    assert (
        rollout(model, settings, asked=asked(60, 1000), reward=copied, seed=1000, sampler=draw, max_tokens=300).figures()[
            "reward"
        ]
        > 0.9
    )
