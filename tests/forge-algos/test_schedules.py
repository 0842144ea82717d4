"""The schedule is transformers', but for a warm-up whose first step teaches something."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import get_scheduler

from forge_algos import OptimizerSettings, lr_factor, schedule

NAMES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}


def optimizer(rate=1.0):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)


def transformers_factors(name, num_steps, warmup_steps):
    """Factor of transformers' schedule before step 1, 2, ..., num_steps + 1."""
    moved = optimizer()
    theirs = get_scheduler(NAMES[name], moved, num_warmup_steps=warmup_steps, num_training_steps=num_steps)
    found = []
    for _ in range(num_steps + 1):
        found.append(moved.param_groups[0]["lr"])
        moved.step()
        theirs.step()
    return found


@given(name=st.sampled_from(list(NAMES)), num_steps=st.integers(1, 30), warmup_steps=st.integers(0, 35))
def test_equals_transformers(name, num_steps, warmup_steps):
    """Every step after the warm-up is transformers'; those of the warm-up are its next ones, so that none has rate 0."""
    theirs = transformers_factors(name, num_steps, warmup_steps)
    for step in range(1, num_steps + 1):
        ours = lr_factor(step, num_steps=num_steps, warmup_steps=warmup_steps, lr_scheduler=name)
        expected = 1.0 if step == warmup_steps else theirs[step] if step < warmup_steps else theirs[step - 1]
        assert ours == pytest.approx(expected, abs=1e-12)
        assert ours > 0


@given(name=st.sampled_from(list(NAMES)), num_steps=st.integers(1, 12), warmup_steps=st.integers(0, 14))
def test_the_scheduler_follows_the_factor(name, num_steps, warmup_steps):
    """torch's scheduler gives the base rate times lr_factor at each step, and goes on quietly past the end."""
    moved = optimizer(0.3)
    config = OptimizerSettings(warmup_steps=warmup_steps, lr_scheduler=name)
    ours = schedule(moved, config, num_steps)
    for step in range(1, num_steps + 4):
        factor = lr_factor(step, num_steps=num_steps, warmup_steps=warmup_steps, lr_scheduler=name)
        assert moved.param_groups[0]["lr"] == pytest.approx(0.3 * factor)
        moved.step()
        ours.step()


@pytest.mark.parametrize("name", NAMES)
def test_where_it_begins_and_ends(name):
    """1 / w at the first step, 1 at the last of the warm-up and at the next; 0 after the last, or still 1."""
    factors = [lr_factor(s, num_steps=10, warmup_steps=4, lr_scheduler=name) for s in range(1, 14)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[10:] == pytest.approx([float(name == "constant")] * 3)
