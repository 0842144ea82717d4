"""DeviceSettings: its defaults, and what it refuses."""

from __future__ import annotations

import attrs
import pytest

from forge_accel import DeviceSettings


def test_everything_is_automatic_by_default():
    """Nobody has to know their machine."""
    assert attrs.asdict(DeviceSettings()) == {
        "device": "auto",
        "dtype": "auto",
        "weights": "float32",
        "attention": "auto",
        "compile": "auto",
        "kernels": "auto",
    }


@pytest.mark.parametrize(
    "wrong",
    [{"dtype": "float16"}, {"dtype": None}, {"attention": "flash"}, {"device": ""}, {"compile": "model"}, {"kernels": True}],
)
def test_a_value_out_of_the_choices_is_refused(wrong):
    """The validator names the field."""
    with pytest.raises(ValueError, match=next(iter(wrong))):
        DeviceSettings(**wrong)


def test_a_device_is_a_string():
    """A number is no device."""
    with pytest.raises(TypeError, match="device"):
        DeviceSettings(device=0)


def test_settings_are_frozen_and_keyword_only():
    """What a run was asked stays what it was asked."""
    with pytest.raises(TypeError):
        DeviceSettings("cpu")
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        DeviceSettings().device = "cpu"


def test_float16_is_refused_with_the_reason():
    """What torch could compute in, and training cannot without scaled losses, is refused with what to take."""
    with pytest.raises(ValueError, match=r"dtype=float16: float16 ends at 65,504.*Set dtype=bfloat16 or float32"):
        DeviceSettings(dtype="float16")


def test_bfloat16_weights_compute_in_bfloat16():
    """Weights of 16 bits are not computed with in float32."""
    assert DeviceSettings(weights="bfloat16").dtype == "auto"
    with pytest.raises(ValueError, match="weights=bfloat16 with dtype=float32"):
        DeviceSettings(weights="bfloat16", dtype="float32")
