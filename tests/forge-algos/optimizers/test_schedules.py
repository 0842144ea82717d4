"""Schedules are transformers', with a warm-up whose first step has a rate above 0."""

import pytest
import torch
from hypothesis import given, strategies as st
from transformers import TrainingArguments, get_scheduler

from forge_algos import SCHEDULES_WITHOUT_LENGTH, OptimizerError, OptimizerSettings, lr_factor, schedule

NAMES = {"cosine": "cosine", "linear": "linear", "constant": "constant_with_warmup"}
FURTHER = {
    "cosine_with_min_lr": ({"min_lr_ratio": 0.1}, {"min_lr_rate": 0.1}),
    "cosine_with_restarts": ({"num_cycles": 3}, {"num_cycles": 3}),
    "inverse_sqrt": ({}, {}),
    "polynomial": ({"min_lr_ratio": 0.2, "power": 2.5}, {"lr_end": 0.2, "power": 2.5}),
    "warmup_stable_decay": ({"min_lr_ratio": 0.05, "decay_steps": 3}, {"min_lr_ratio": 0.05, "num_decay_steps": 3}),
}
"""Settings of each further schedule, two of each."""


def optimizer(rate=1.0):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=rate)


def transformers_factors(name, num_steps, warmup_steps):
    """Return the factors of transformers' schedule before steps 1, 2, ..., num_steps + 1."""
    moved = optimizer()
    theirs = get_scheduler(
        NAMES.get(name, name),
        moved,
        num_warmup_steps=warmup_steps,
        num_training_steps=num_steps,
        scheduler_specific_kwargs=FURTHER.get(name, ({}, {}))[1],
    )
    found = []
    for _ in range(num_steps + 1):
        found.append(moved.param_groups[0]["lr"])
        moved.step()
        theirs.step()
    return found


@given(name=st.sampled_from(list(NAMES)), num_steps=st.integers(1, 30), warmup_steps=st.integers(0, 35))
def test_equals_transformers(name, num_steps, warmup_steps):
    """Every step after the warm-up is transformers'.
    Those of the warm-up are its next ones, so that none has rate 0.
    """
    theirs = transformers_factors(name, num_steps, warmup_steps)
    for step in range(1, num_steps + 1):
        ours = lr_factor(step, num_steps=num_steps, warmup_steps=warmup_steps, lr_scheduler=name)
        expected = 1.0 if step == warmup_steps else theirs[step] if step < warmup_steps else theirs[step - 1]
        assert ours == pytest.approx(expected, abs=1e-12)
        assert ours > 0


@given(name=st.sampled_from(list(NAMES)), num_steps=st.integers(1, 12), warmup_steps=st.integers(0, 14))
def test_the_scheduler_follows_the_factor(name, num_steps, warmup_steps):
    """torch's scheduler gives the base rate times lr_factor, past the end too."""
    moved = optimizer(0.3)
    config = OptimizerSettings(warmup_steps=warmup_steps, lr_scheduler=name)
    ours = schedule(moved, config, num_steps)
    for step in range(1, num_steps + 4):
        factor = lr_factor(step, num_steps=num_steps, warmup_steps=warmup_steps, lr_scheduler=name)
        assert moved.param_groups[0]["lr"] == pytest.approx(0.3 * factor)
        moved.step()
        ours.step()


@pytest.mark.parametrize("name", NAMES)
def test_first_and_last_factors(name):
    """1 / w at the first step, 1 at the last of the warm-up and the next; 0 after the last.
    Or still 1, for the constant.
    """
    factors = [lr_factor(s, num_steps=10, warmup_steps=4, lr_scheduler=name) for s in range(1, 14)]
    assert factors[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors[10:] == pytest.approx([float(name == "constant")] * 3)


@given(name=st.sampled_from(list(FURTHER)), num_steps=st.integers(4, 30), data=st.data())
def test_the_further_schedules_are_transformers(name, num_steps, data):
    """Every step after the warm-up is transformers'; the warm-up rises from 1 / w."""
    warmup_steps = data.draw(st.integers(0, num_steps - 3))
    theirs = transformers_factors(name, num_steps, warmup_steps)
    config = OptimizerSettings(learning_rate=0.3, lr_scheduler=name, warmup_steps=warmup_steps, **FURTHER[name][0])
    moved = optimizer(0.3)
    ours = schedule(moved, config, num_steps)
    for step in range(1, num_steps + 1):
        expected = step / warmup_steps if step <= warmup_steps else theirs[step - 1]
        assert moved.param_groups[0]["lr"] == pytest.approx(0.3 * expected, abs=1e-12)
        moved.step()
        ours.step()


@pytest.mark.parametrize(
    ("name", "last"),
    [("cosine_with_min_lr", 0.1), ("cosine_with_restarts", 0.0), ("polynomial", 0.2), ("warmup_stable_decay", 0.05)],
)
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_last_factors_of_further_schedules(name, last, warmup_steps):
    """They end at their lowest and stay there, where transformers' cosine would rise again."""
    factors = [
        lr_factor(step, num_steps=12, warmup_steps=warmup_steps, lr_scheduler=name, **FURTHER[name][0])
        for step in (warmup_steps + 1, 13, 14, 20)
    ]
    assert factors == pytest.approx([1.0, last, last, last])


@pytest.mark.parametrize("name", [name for name in FURTHER if name != "warmup_stable_decay"])
def test_a_warmup_as_long_as_the_run(name):
    """A warm-up may end with the run, without a division by zero."""
    factors = [lr_factor(step, num_steps=3, warmup_steps=3, lr_scheduler=name, **FURTHER[name][0]) for step in (1, 2, 3, 4)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert 0 <= factors[3] <= 1


def test_a_decay_longer_than_the_run_is_refused():
    """A decay longer than the run is refused with both settings, before the first step."""
    config = OptimizerSettings(lr_scheduler="warmup_stable_decay", warmup_steps=4, decay_steps=7)
    with pytest.raises(OptimizerError, match="warmup_steps=4 and decay_steps=7 are more than the run's 10 steps"):
        schedule(optimizer(), config, 10)
    schedule(optimizer(), config, 11)


@pytest.mark.parametrize("lr_scheduler", SCHEDULES_WITHOUT_LENGTH)
@pytest.mark.parametrize("warmup_steps", [0, 3])
def test_a_run_without_end_has_the_rates_of_any_length(lr_scheduler, warmup_steps):
    """Step by step those of a run of 40 steps, and of one that is longer; further on they never rise again."""
    given = {"lr_scheduler": lr_scheduler, "warmup_steps": warmup_steps}
    endless = [lr_factor(step, num_steps=None, **given) for step in range(1, 41)]
    for num_steps in (40, 1000):
        assert endless == [lr_factor(step, num_steps=num_steps, **given) for step in range(1, 41)]
    late = [lr_factor(step, num_steps=None, **given) for step in (10**5, 10**6, 10**9)]
    assert late == sorted(late, reverse=True)
    assert 0 < late[-1] <= 1


@pytest.mark.parametrize("lr_scheduler", [name for name in (*NAMES, *FURTHER) if name not in SCHEDULES_WITHOUT_LENGTH])
def test_a_schedule_that_needs_the_end_is_refused_without_one(lr_scheduler):
    """The message names those that do not."""
    with pytest.raises(OptimizerError, match=f"lr_scheduler={lr_scheduler} needs to know the end.*constant or inverse_sqrt"):
        lr_factor(1, num_steps=None, lr_scheduler=lr_scheduler)


@given(num_steps=st.integers(1, 500), ratio=st.floats(0.001, 0.999))
def test_a_share_of_warmup_is_transformers(num_steps, ratio):
    """Rounded up, at least one step and at most all; a number of steps is left as it is."""
    steps = OptimizerSettings(warmup_ratio=ratio).warmup(num_steps)
    assert steps == TrainingArguments(warmup_steps=ratio).get_warmup_steps(num_steps)
    assert 1 <= steps <= num_steps
    assert OptimizerSettings(warmup_steps=7).warmup(num_steps) == OptimizerSettings(warmup_steps=7).warmup(None) == 7


def test_a_schedule_with_a_share_of_warmup():
    """The rates are those of its number of steps; a run without end has none."""
    for lr_scheduler in ("cosine", "constant"):
        shared = OptimizerSettings(warmup_ratio=0.25, lr_scheduler=lr_scheduler)
        assert shared.needs_length
        assert OptimizerSettings(warmup_steps=3, lr_scheduler=lr_scheduler).needs_length == (lr_scheduler == "cosine")
        found = schedule(optimizer(), shared, 12).lr_lambdas[0]
        assert [found(step) for step in range(13)] == [
            lr_factor(step + 1, num_steps=12, warmup_steps=3, lr_scheduler=lr_scheduler) for step in range(13)
        ]
    with pytest.raises(OptimizerError, match="warmup_ratio=0.25 is a share of the run's steps.*give warmup_steps"):
        schedule(optimizer(), OptimizerSettings(warmup_ratio=0.25, lr_scheduler="constant"), None)
    with pytest.raises(ValueError, match="warmup_steps=2 and warmup_ratio=0.1 are two lengths"):
        OptimizerSettings(warmup_steps=2, warmup_ratio=0.1)
