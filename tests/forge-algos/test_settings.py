"""Settings say what they are and refuse what they cannot be."""

import math

import attrs
import pytest

from forge_algos import AdapterSettings, OptimizerSettings


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("learning_rate", bad) for bad in (0, -1.0, math.nan, math.inf, True, "1e-4")),
        *(("weight_decay", bad) for bad in (-0.1, math.nan, math.inf, False, None)),
        *((name, bad) for name in ("beta1", "beta2") for bad in (-0.1, 1.0, math.nan, "0.9")),
        *(("eps", bad) for bad in (0.0, -1e-8, math.nan)),
        *(("max_grad_norm", bad) for bad in (-1.0, math.nan, math.inf)),
        *(("warmup_steps", bad) for bad in (-1, 1.5, True, "3")),
        *(("lr_scheduler", bad) for bad in ("cosin", None)),
        *(("on_nan", bad) for bad in ("ignore", None, True)),
    ],
)
def test_optimizer_settings_refuse(name, bad):
    """Out of range, not finite, of another type: refused, and the message names the field."""
    with pytest.raises((ValueError, TypeError), match=name):
        OptimizerSettings(**{name: bad})


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        ("adapter", "qlora"),
        *(("lora_r", bad) for bad in (0, -4, 2.0, True)),
        *(("lora_alpha", bad) for bad in (0, -1.0, math.nan, math.inf)),
        *(("lora_dropout", bad) for bad in (-0.1, 1.0, math.nan)),
        *(("target_modules", bad) for bad in ("q_proj", (), ("",), (1,), 3)),
    ],
)
def test_adapter_settings_refuse(name, bad):
    """The same for adapters; a bare string is not taken for a list of letters."""
    with pytest.raises((ValueError, TypeError), match=name):
        AdapterSettings(**{"adapter": "lora", name: bad})


@pytest.mark.parametrize(
    ("name", "value"), [("lora_r", 8), ("lora_alpha", 1), ("lora_dropout", 0.1), ("target_modules", ("q_proj",))]
)
def test_a_setting_without_effect_is_refused(name, value):
    """No adapter, no rank: a lora setting beside adapter='none' says what to do."""
    AdapterSettings(adapter="lora", **{name: value})
    with pytest.raises(ValueError, match=f"{name}=.*no effect with adapter='none'"):
        AdapterSettings(**{name: value})


def test_whole_numbers_are_numbers():
    """An int is taken where a float is meant, and a list where a tuple is."""
    assert OptimizerSettings(learning_rate=1, weight_decay=0).learning_rate == 1
    assert AdapterSettings(adapter="lora", target_modules=["q_proj"]).target_modules == ("q_proj",)


def test_the_default_rate_is_the_adapters():
    """2e-5 for all weights, 2e-4 for adapters; a given rate stays."""
    assert OptimizerSettings().resolve().learning_rate == 2e-5
    assert OptimizerSettings().resolve("lora").learning_rate == 2e-4
    assert OptimizerSettings(learning_rate=3.0).resolve("lora").learning_rate == 3.0


def test_settings_are_frozen():
    """Settings do not change during a run."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        OptimizerSettings().eps = 1.0
