"""PlanSettings: defaults, limits, and what they mean to plan()."""

import pytest

from forge_packing import PlanSettings


def test_defaults():
    """The defaults are the documented ones."""
    settings = PlanSettings()
    assert (settings.effective_batch_size, settings.max_tokens_per_gpu, settings.seed) == (32, None, 42)
    assert (settings.num_epochs, settings.max_steps, settings.max_tokens) == (None, None, None)
    assert settings.shuffle is True


@pytest.mark.parametrize("value", [0, "no", None])
def test_shuffle_is_a_bool(value):
    """What is neither true nor false is refused by name."""
    with pytest.raises(TypeError, match="'shuffle' must be"):
        PlanSettings(shuffle=value)


@pytest.mark.parametrize(
    ("given", "epochs", "steps"),
    [
        ({}, 1, None),
        ({"num_epochs": 3}, 3, None),
        ({"max_steps": 20}, None, 20),
        ({"num_epochs": 2, "max_steps": 20}, 2, 20),
        ({"max_tokens": 50}, None, 5),
        ({"max_tokens": 50, "num_epochs": 2}, 2, 5),
        ({"max_tokens": 50, "max_steps": 4}, None, 4),
        ({"max_tokens": 50, "max_steps": 6}, None, 5),
        ({"num_epochs": "inf"}, None, None),
        ({"num_epochs": "inf", "max_steps": 20}, None, 20),
    ],
)
def test_limits_resolve(given, epochs, steps):
    """One epoch unless another limit is given; all limits that are given stand, and inf is none."""
    settings = PlanSettings(**given)
    assert (settings.epochs, settings.last_step(lambda tokens: tokens // 10)) == (epochs, steps)


@pytest.mark.parametrize("name", ["effective_batch_size", "max_tokens_per_gpu", "num_epochs", "max_steps", "max_tokens"])
@pytest.mark.parametrize("value", [0, -1])
def test_counts_are_at_least_one(name, value):
    """A count below 1 is refused by name and value."""
    with pytest.raises(ValueError, match=f"{name} must be an integer .*got {value}"):
        PlanSettings(**{name: value})


@pytest.mark.parametrize(
    "name", ["effective_batch_size", "max_tokens_per_gpu", "num_epochs", "max_steps", "max_tokens", "seed"]
)
@pytest.mark.parametrize("value", [True, 2.0, "2", float("nan")])
def test_only_integers(name, value):
    """Bools, floats and strings are refused by name, value and type."""
    with pytest.raises(TypeError, match=rf"{name} must be an integer .*\({type(value).__name__}\)"):
        PlanSettings(**{name: value})


@pytest.mark.parametrize("name", ["effective_batch_size", "max_tokens_per_gpu"])
def test_sizes_that_no_plan_holds(name):
    """What a plan's 32 bits cannot count is refused before any row is read."""
    assert getattr(PlanSettings(**{name: 2**31 - 1}), name) == 2**31 - 1
    with pytest.raises(ValueError, match=f"{name} must be an integer from 1 to 2147483647, got {2**31}"):
        PlanSettings(**{name: 2**31})


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed_range(seed):
    """A seed fits into 32 bits, as every generator that it feeds requires."""
    with pytest.raises(ValueError, match="seed must be an integer from 0 to 4294967295"):
        PlanSettings(seed=seed)


def test_every_setting_has_help():
    """Each field has a docstring below it: the command line's help is made from them."""
    import ast
    import inspect

    body = ast.parse(inspect.getsource(PlanSettings)).body[0].body
    for field, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(field, ast.AnnAssign):
            assert isinstance(after, ast.Expr), field.target.id
            assert after.value.value.endswith(".")
