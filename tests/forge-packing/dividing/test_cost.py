"""Cost: tokens and attention's share, from weights or from a model's shape."""

import attrs
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from forge_packing import Cost, PackingError
from forge_packing.dividing._cost import integer_costs

from ..naive import COSTS


def test_of():
    """A sample costs what is linear in its length and what is quadratic; float64, from any integers."""
    cost = Cost(per_token=2.0, per_token_squared=0.25, per_micro_batch=100.0)
    assert cost.of([1, 4]).tolist() == [2.25, 12.0]
    assert cost.of(np.array([4], dtype=np.uint16)).dtype == np.float64


def test_default_is_an_8b_llama():
    """Without anything known, attention's share is that of Llama-3.1-8B: its parameters, layers and width."""
    llama = Cost.for_model(hidden=4096, layers=32, parameters=8_030_261_248)
    assert Cost().per_token_squared == pytest.approx(llama.per_token_squared, rel=0.005)
    assert (Cost().per_token, Cost().per_micro_batch) == (1.0, 0.0)


def test_for_model_counts_the_weights():
    """The weights that follow from Llama-3.1-8B's shape are its published ones, less the input embedding and the norms."""
    cost = Cost.for_model(hidden=4096, layers=32, intermediate=14336, vocab=128_256, key_value=1024, per_micro_batch=7.0)
    weights = 8_030_261_248 - 128_256 * 4096 - 65 * 4096
    assert cost == Cost(1.0, 4096 * 32 / weights, 7.0)
    # Qwen3-0.6B's attention is twice as wide as its model, so the share of pairs is twice as large.
    narrow = Cost.for_model(hidden=1024, layers=28, parameters=596_049_920)
    wide = Cost.for_model(hidden=1024, layers=28, parameters=596_049_920, attention=2048)
    assert wide.per_token_squared == 2 * narrow.per_token_squared
    # Without an intermediate size: 4 * hidden**2 for attention, 8 for the MLP.
    assert Cost.for_model(hidden=64, layers=2).per_token_squared == 64 * 2 / (2 * 12 * 64**2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"per_token": -1.0}, "per_token must be 0, or a number from 1e-30 to 1e.30, got -1.0"),
        ({"per_token_squared": float("nan")}, "per_token_squared must be .* got nan"),
        ({"per_token": float("inf")}, "per_token must be .* got inf"),
        ({"per_micro_batch": "1"}, "per_micro_batch must be .* got '1'"),
        ({"per_token": True}, "per_token must be .* got True"),
        ({"per_token": 1e-40}, "got 1e-40"),
        ({"per_token": 0.0, "per_token_squared": 0}, "are both 0: no sample costs anything"),
    ],
)
def test_refuses_weights(arguments, message):
    """A weight that is no cost is named with its value."""
    with pytest.raises(PackingError, match=message):
        Cost(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": 0}, "hidden must be an integer of at least 1, got 0"),
        ({"layers": 2.0}, "layers must be an integer of at least 1, got 2.0"),
        ({"parameters": 10, "vocab": 5}, "give parameters, or intermediate and vocab"),
        ({"parameters": 10, "intermediate": 5}, "give parameters, or intermediate and vocab"),
    ],
)
def test_refuses_shapes(arguments, message):
    """So is a shape that is no model's."""
    with pytest.raises(PackingError, match=message):
        Cost.for_model(**{"hidden": 8, "layers": 2, **arguments})


def test_frozen():
    """A cost is a value: equal, hashable, not to be changed."""
    assert len({Cost(), Cost(1.0), Cost(1.0, 0.5)}) == 2
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        Cost().per_token = 2.0


@settings(deadline=None, max_examples=200)
@given(COSTS, st.lists(st.lists(st.integers(1, 2**31 - 1), min_size=1, max_size=20), min_size=1, max_size=5))
def test_integer_costs(cost, given_steps):
    """As integers costs keep their order, their proportions to a billionth of the costliest, and their sums below 2**62."""
    lengths = [sorted(step, reverse=True) for step in given_steps]
    starts = np.cumsum([0, *map(len, lengths)])
    found = integer_costs(cost.of(np.array([n for step in lengths for n in step])), starts)
    for step, start in zip(lengths, starts, strict=False):
        integers, values = found[start : start + len(step)], cost.of(step)
        assert (np.diff(integers) <= 0).all()
        assert integers.min() >= 1
        assert sum(integers.tolist()) < 2**62
        np.testing.assert_allclose(integers / integers[0], values / values[0], atol=1e-9)


def test_integer_costs_of_a_step_do_not_depend_on_its_neighbours():
    """A step's integers are the same alone and among others: `divide` and a plan agree."""
    lengths, starts = np.array([9, 4, 70_000, 3, 3]), np.array([0, 2, 5])
    together = integer_costs(Cost().of(lengths), starts).tolist()
    assert together[:2] == integer_costs(Cost().of(lengths[:2]), np.array([0, 2])).tolist()
    assert together[2:] == integer_costs(Cost().of(lengths[2:]), np.array([0, 3])).tolist()
