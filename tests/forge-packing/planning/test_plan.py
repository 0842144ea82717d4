"""plan: the laws of every plan, and what it refuses."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import Cost, PackingError, plan


@st.composite
def arguments(draw):
    """Lengths and every parameter of plan(), such that there is a plan."""
    max_tokens = draw(st.integers(1, 50))
    lengths = draw(st.lists(st.integers(1, max_tokens), min_size=1, max_size=16))
    salt = draw(st.integers(0, 9))  # one draw for what need not be drawn sample by sample: a third of the time
    batch_size = draw(st.integers(1, 8))
    max_steps = draw(st.none() | st.integers(1, 12))
    epochs = draw(st.integers(1, 3)) if max_steps is None else draw(st.none() | st.integers(1, 3))
    return {
        "lengths": lengths,
        "batch_size": batch_size,
        "max_tokens": max_tokens,
        "world_size": draw(st.integers(1, batch_size)),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "epochs": epochs,
        "max_steps": max_steps,
        "loss_counts": [(index * 7 + salt) % length for index, length in enumerate(lengths)],
        "shuffle": draw(st.booleans()),
        "drop_last": len(lengths) >= batch_size and draw(st.booleans()),
        **(draw(mixtures(len(lengths), salt)) if draw(st.booleans()) else {}),
    }


@st.composite
def mixtures(draw, n, salt):
    """Sources and weights of n samples, every source with at least one."""
    weights = draw(st.lists(st.integers(1, 9) | st.sampled_from([0.5, 0.25]), min_size=1, max_size=min(n, 3)))
    rest = [(index * index + salt) % len(weights) for index in range(n - len(weights))]
    return {"weights": weights, "sources": [*range(len(weights)), *rest]}


@settings(deadline=None, max_examples=1000)
@given(arguments())
def test_a_step_is_divided_exactly(given_arguments):
    """Each step: every sample once, in the order of the step; the budget; the same number on all ranks; right sums."""
    made = plan(**given_arguments)
    lengths, counts = np.asarray(given_arguments["lengths"]), np.asarray(given_arguments["loss_counts"])
    for step in range(made.num_steps):
        samples = made.samples(step)
        ranks = [made.micro_batches(step, rank) for rank in range(made.world_size)]
        assert len({len(rank) for rank in ranks}) == 1
        micro_batches = [micro_batch for rank in ranks for micro_batch in rank]
        assert sorted(np.concatenate(micro_batches).tolist()) == sorted(samples.tolist())
        for micro_batch in micro_batches:
            assert lengths[micro_batch].sum() <= made.max_tokens
            in_order = iter(samples.tolist())
            assert all(sample in in_order for sample in micro_batch.tolist())
        assert made.tokens[step] == lengths[samples].sum()
        assert made.loss_tokens[step] == counts[samples].sum()
    made.check()


@settings(deadline=None, max_examples=1000)
@given(arguments())
def test_epochs_hold_every_sample(given_arguments):
    """Steps do not cross epochs; a whole epoch has every sample once; the run stops at the first of its limits."""
    made = plan(**given_arguments)
    n, batch_size = len(given_arguments["lengths"]), made.batch_size
    per_epoch = n // batch_size if made.drop_last else -(-n // batch_size)
    limits = [made.max_steps, None if made.epochs is None else made.epochs * per_epoch]
    assert made.num_steps == min(limit for limit in limits if limit is not None)
    assert made.num_samples == sum(made.samples(step).size for step in range(made.num_steps))
    for epoch in range(made.epoch(made.num_steps - 1) + 1):
        steps = [step for step in range(made.num_steps) if made.epoch(step) == epoch]
        assert steps[0] == epoch * per_epoch
        assert all(made.samples(step).size == batch_size for step in steps[:-1])
        samples = np.concatenate([made.samples(step) for step in steps]).tolist()
        assert made.weights is not None or len(set(samples)) == len(samples)
        if len(steps) == per_epoch:
            assert len(samples) == (n // batch_size * batch_size if made.drop_last else n)


@settings(deadline=None, max_examples=1000)
@given(arguments(), st.integers(1, 12), st.integers(0, 100), st.sampled_from([0.0, 1e-4, 0.5]))
def test_order_is_global(given_arguments, world_size, more_tokens, squared):
    """A step's samples depend on neither the ranks, the budget nor the cost, nor on how long the run goes on."""
    made = plan(**given_arguments)
    other = plan(
        **{
            **given_arguments,
            "world_size": min(world_size, made.batch_size),
            "max_tokens": made.max_tokens + more_tokens,
            "epochs": None,
            "max_steps": made.num_steps + 3,
            "cost": Cost(per_token_squared=squared),
        }
    )
    for step in range(made.num_steps):
        assert made.samples(step).tolist() == other.samples(step).tolist()


@settings(deadline=None, max_examples=1000)
@given(arguments(), st.integers(1, 12), st.integers(0, 100))
def test_reshape_keeps_the_samples(given_arguments, world_size, more_tokens):
    """On other ranks and in other micro-batches each step has the samples that it had, and the plan is one made so at once."""
    made = plan(**given_arguments)
    shape = {"world_size": min(world_size, made.batch_size), "max_tokens": made.max_tokens + more_tokens}
    other = made.reshape(**shape)
    other.check()
    assert (other.world_size, other.max_tokens) == tuple(shape.values())
    assert [made.samples(step).tolist() for step in range(made.num_steps)] == [
        other.samples(step).tolist() for step in range(other.num_steps)
    ]
    assert other.fingerprint == plan(**{**given_arguments, **shape}).fingerprint


@settings(deadline=None, max_examples=1000)
@given(arguments(), st.data())
def test_a_position_is_one_integer(given_arguments, data):
    """position and step_at undo each other, and a position is how many samples the run has seen."""
    made = plan(**given_arguments)
    step = data.draw(st.integers(0, made.num_steps))
    assert made.position(step) == sum(made.samples(before).size for before in range(step))
    assert made.step_at(made.position(step)) == step
    position = data.draw(st.integers(0, made.num_samples))
    assert made.position(made.step_at(position)) <= position


@settings(deadline=None, max_examples=1000)
@given(arguments(), st.randoms(use_true_random=False))
def test_deterministic(given_arguments, random):
    """The same input makes the same steps, in whichever order they are asked for."""
    first, second = plan(**given_arguments), plan(**given_arguments)
    assert first.fingerprint == second.fingerprint
    steps = [(step, rank) for step in range(first.num_steps) for rank in range(first.world_size)]
    asked = {place: [m.tolist() for m in second.micro_batches(*place)] for place in random.sample(steps, len(steps))}
    assert [[m.tolist() for m in first.micro_batches(*place)] for place in steps] == [asked[place] for place in steps]


def test_epochs_and_seeds_have_their_own_order():
    """Two epochs differ, two seeds differ; without shuffle every epoch is in the order of the data."""
    two = plan([1] * 50, batch_size=50, max_tokens=50, epochs=2)
    assert two.samples(0).tolist() != two.samples(1).tolist()
    assert two.samples(0).tolist() != plan([1] * 50, batch_size=50, max_tokens=50, seed=1).samples(0).tolist()
    plain = plan([1] * 50, batch_size=50, max_tokens=50, epochs=2, shuffle=False)
    assert plain.samples(0).tolist() == plain.samples(1).tolist() == list(range(50))


def test_the_order_does_not_follow_from_the_batch_size_in_disguise():
    """Batches of another size cut the same order elsewhere."""
    orders = []
    for batch_size in (3, 7):
        made = plan([2] * 21, batch_size=batch_size, max_tokens=9, seed=5)
        orders.append(np.concatenate([made.samples(step) for step in range(made.num_steps)]).tolist())
    assert orders[0] == orders[1]


def test_lengths_may_change_afterwards():
    """The plan keeps copies: an array that its caller changes later does not change it."""
    lengths, counts = np.array([3, 4, 5]), np.array([2, 3, 4])
    made = plan(lengths, batch_size=2, max_tokens=9, loss_counts=counts)
    before = made.fingerprint
    lengths[:] = counts[:] = 1
    assert made.lengths.tolist() == [3, 4, 5]
    made.__dict__.pop("fingerprint")
    assert made.fingerprint == before
    assert sum(made.loss_tokens) == 9


REFUSED = [
    ({"lengths": []}, "lengths is empty"),
    ({"lengths": np.zeros(0, dtype=np.int64)}, "lengths is empty"),
    ({"lengths": [4, 0, 0]}, r"at least 1 token, found 0 at index 1 \(and 1 more like it\)"),
    ({"lengths": [4, 2, -3]}, "at least 1 token, found -3 at index 2"),
    ({"lengths": [4, 2.5]}, "lengths must be integers, found 4.0 at index 0"),
    ({"lengths": [float("nan")]}, "lengths must be integers, found nan at index 0"),
    ({"lengths": ["4"]}, "lengths must be integers, found '4' at index 0"),
    ({"lengths": [True, True]}, "lengths must be integers, found True at index 0"),
    ({"lengths": [1, 2**70]}, f"lengths must fit into int64, found {2**70} at index 1"),
    ({"lengths": np.array([1, 2**63], dtype=np.uint64)}, f"must fit into int64, found {2**63} at index 1"),
    ({"lengths": [[4, 5], [6, 7]]}, r"flat sequence of integers, got an array of shape \(2, 2\)"),
    ({"lengths": [[4], [6, 7]]}, "flat sequence of integers"),
    ({"lengths": 7}, "flat sequence of integers, got int"),
    ({"lengths": {4, 5}}, "flat sequence of integers, got set"),
    ({"lengths": np.array([4, None], dtype=object)}, "lengths must be integers, found None at index 1"),
    ({"lengths": [4, 11, 20]}, "sample 1 has 11 tokens, more than max_tokens=10 .and 1 more.*max_tokens to at least 20"),
    ({"batch_size": 0}, "batch_size must be an integer from 1 to 2147483647, got 0"),
    ({"batch_size": 2.0}, r"batch_size must be an integer .* got 2.0 \(float\)"),
    ({"batch_size": True}, r"batch_size must be .* got True \(bool\)"),
    ({"batch_size": 2, "world_size": 3}, "batch_size=2 is less than world_size=3.*at least 3"),
    ({"world_size": 0}, "world_size must be an integer from 1 to 1048576, got 0"),
    ({"world_size": 10**9, "batch_size": 10**9}, "world_size must be an integer from 1 to 1048576, got 1000000000"),
    ({"max_tokens": -5}, "max_tokens must be an integer from 1 to 2147483647, got -5"),
    ({"max_tokens": 2**31}, "max_tokens must be an integer from 1 to 2147483647, got 2147483648"),
    ({"max_tokens": None}, r"max_tokens must be .* got None \(NoneType\)"),
    ({"epochs": 0}, "epochs must be an integer from 1 to 4294967296, got 0"),
    ({"epochs": -1}, "epochs must be an integer from 1 to 4294967296, got -1"),
    ({"epochs": 2**33}, "epochs must be an integer from 1 to 4294967296, got 8589934592"),
    ({"max_steps": 0}, "max_steps must be an integer from 1 to 281474976710656, got 0"),
    ({"seed": -1}, "seed must be an integer from 0 to 4294967295, got -1"),
    ({"drop_last": "false"}, r"drop_last must be True or False, got 'false' \(str\)"),
    ({"shuffle": 0}, r"shuffle must be True or False, got 0 \(int\)"),
    ({"cost": 3}, r"cost must be a Cost, got 3. Give Cost\(...\)"),
    ({"loss_counts": [1, 1]}, "one entry a sample: got 2 for 3 lengths"),
    ({"loss_counts": [1, 9, 1]}, "between 0 and one less than the sample's length, found 9 at index 1, a sample of 5 tokens"),
    ({"loss_counts": [4, 4, 5]}, "found 4 at index 0, a sample of 4 tokens. .* so it is never learned"),
    ({"loss_counts": [1, 1, -1]}, "between 0 and one less than the sample's length, found -1 at index 2"),
    ({"weights": [1, 2]}, "weights are given for 2 sources, and no sources"),
    ({"loss_counts": [1.0, 1.0, 1.0]}, "loss_counts must be integers"),
    ({"drop_last": True, "batch_size": 4}, "drop_last leaves no step: 3 samples are fewer than batch_size=4"),
]


@pytest.mark.parametrize(("changed", "message"), REFUSED, ids=[f"{case[0]}"[:60] for case in REFUSED])
def test_refuses(changed, message):
    """Bad input is a PackingError that says what was found, where, and what to do."""
    good = {"lengths": [4, 5, 6], "batch_size": 2, "max_tokens": 10}
    plan(**good)
    with pytest.raises(PackingError, match=message):
        plan(**{**good, **changed})
