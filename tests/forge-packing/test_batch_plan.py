"""BatchPlan: what can be asked of it."""

import attrs
import numpy as np
import pytest

from forge_packing import PackingError, plan


@pytest.fixture
def made():
    return plan([3, 5, 2, 7, 4], batch_size=2, max_tokens=8, world_size=2, shuffle=False, loss_counts=[1, 2, 0, 4, 3])


def test_answers(made):
    """Steps, samples, micro-batches, sums and epochs of a plan small enough to be done by hand."""
    assert (made.num_steps, made.num_samples) == (3, 5)
    assert [made.samples(step).tolist() for step in range(3)] == [[0, 1], [2, 3], [4]]
    assert [[m.tolist() for m in made.micro_batches(step, 0)] for step in range(3)] == [[[1]], [[3]], [[4]]]
    assert [[m.tolist() for m in made.micro_batches(step, 1)] for step in range(3)] == [[[0]], [[2]], [[]]]
    assert made.tokens.tolist() == [8, 9, 4]
    assert made.loss_tokens.tolist() == [3, 4, 3]
    assert [made.epoch(step) for step in range(3)] == [0, 0, 0]


def test_several_micro_batches():
    """Micro-batches come in the order in which they are run, the heaviest first."""
    made = plan([6, 5, 6, 4, 2], batch_size=5, max_tokens=8, shuffle=False)
    assert [m.tolist() for m in made.micro_batches(0)] == [[0], [2], [3, 4], [1]]


def test_answers_are_copies(made):
    """Whoever changes an answer does not change the plan; the sums cannot be changed at all."""
    made.samples(0)[:] = 9
    made.micro_batches(0)[0][:] = 9
    assert made.samples(0).tolist() == [0, 1]
    assert made.micro_batches(0)[0].tolist() == [1]
    with pytest.raises(ValueError, match="read-only"):
        made.tokens[0] = 1


@pytest.mark.parametrize("step", [-1, 3])
def test_step_out_of_range(made, step):
    """No negative or late step: it would silently be another one."""
    for ask in (made.samples, made.micro_batches, made.epoch):
        with pytest.raises(IndexError, match=rf"step {step} is out of range: this plan has 3 \(step 0 to 2\)"):
            ask(step)


@pytest.mark.parametrize("rank", [-1, 2])
def test_rank_out_of_range(made, rank):
    """A rank that the plan was not made for gets nothing."""
    with pytest.raises(IndexError, match=rf"rank {rank} is out of range: this plan has 2"):
        made.micro_batches(0, rank)


def test_loss_tokens_need_loss_counts():
    """Without loss_counts there is no normaliser, and no zero in its place."""
    with pytest.raises(PackingError, match=r"made without loss_counts\. Pass loss_counts to plan"):
        _ = plan([1], batch_size=1, max_tokens=1).loss_tokens


def test_fingerprint_tells_plans_apart():
    """Every parameter and both input arrays are in the fingerprint."""
    base = {
        "lengths": [3, 5, 2, 7, 4],
        "batch_size": 2,
        "max_tokens": 8,
        "world_size": 1,
        "seed": 0,
        "epochs": 2,
        "max_steps": 4,
        "loss_counts": [1] * 5,
        "shuffle": True,
        "drop_last": False,
    }
    changes = {
        "lengths": [3, 5, 2, 7, 5],
        "batch_size": 3,
        "max_tokens": 9,
        "world_size": 2,
        "seed": 1,
        "epochs": 3,
        "max_steps": 5,
        "loss_counts": [1, 1, 1, 1, 2],
        "shuffle": False,
        "drop_last": True,
    }
    assert base.keys() == changes.keys()
    fingerprints = [plan(**{**base, name: value}).fingerprint for name, value in changes.items()]
    fingerprints += [plan(**base).fingerprint, plan(**{**base, "loss_counts": None}).fingerprint]
    assert len(set(fingerprints)) == len(changes) + 2
    assert all(len(fingerprint) == 64 for fingerprint in fingerprints)


def test_golden_fingerprint():
    """The same plan on every machine and in every version that can read its file."""
    made = plan([3, 5, 2, 7, 4, 8, 1], batch_size=3, max_tokens=9, world_size=2, seed=11, epochs=2, loss_counts=[1] * 7)
    assert made.fingerprint == "3ea925f0081a69d91fdb475548d13aaf4a6c578f372b46d73eae00f804d10aac"


def test_frozen(made):
    """A plan cannot be changed in place."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        made.seed = 3
    with pytest.raises(ValueError, match="read-only"):
        made.lengths[0] = 3


def test_prints_in_one_line(made):
    """Printing a plan shows its parameters, not its arrays."""
    assert repr(made) == (
        "BatchPlan(batch_size=2, max_tokens=8, world_size=2, seed=0, epochs=1, max_steps=None, shuffle=False, drop_last=False)"
    )


def test_numpy_integers_are_places(made):
    """A step that came out of an array is as good as an int."""
    assert made.samples(np.int32(1)).tolist() == [2, 3]
