"""Weights in 4 or 8 bits: the devices that can hold them, and the errors of the others."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import pytest

from forge_accel import Accelerator, AccelError, CPUAccelerator
from forge_accel.devices._quantization import check_quantization


@pytest.fixture
def bitsandbytes(monkeypatch):
    """`bitsandbytes(version)`: let that version be installed, or none."""

    def make(found):
        def version(_name):
            if found is None:
                raise PackageNotFoundError
            return found

        monkeypatch.setattr("forge_accel.devices._quantization.version", version)

    return make


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "int8"])
@pytest.mark.parametrize("found", ["0.50.0", "0.50.2.dev0", "0.51", "1.0.0"])
def test_the_cpu_can(bitsandbytes, quant_type, found):
    """With a bitsandbytes that has kernels for it; the reason names the type and the version."""
    bitsandbytes(found)
    choice = CPUAccelerator().quantization(quant_type)
    assert choice.value == quant_type
    bits = 8 if quant_type == "int8" else 4
    assert choice.reason.startswith(f"{quant_type}: bitsandbytes {found} holds the frozen weights in {bits} bits")


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, r"bitsandbytes, which is not installed: `pip install 'bitsandbytes>=0\.50'`"),
        ("0.49.9", r"needs bitsandbytes>=0\.50, and 0\.49\.9 is installed"),
        ("0.5", r"and 0\.5 is installed"),
        ("unknown", "and unknown is installed"),
    ],
)
def test_what_is_missing_is_named(bitsandbytes, found, message):
    """With the command that installs it."""
    bitsandbytes(found)
    with pytest.raises(AccelError, match=message):
        CPUAccelerator().quantization("nf4")


def test_an_unknown_type_is_refused(bitsandbytes):
    """Before anything else is looked for."""
    bitsandbytes(None)
    with pytest.raises(AccelError, match="quant_type='int3' is unknown: use nf4, fp4 or int8"):
        check_quantization("int3")


def test_a_device_that_cannot_names_what_can(bitsandbytes):
    """A plug-in that does not override `quantization` refuses, and names a device that every machine has."""

    class Toy(CPUAccelerator):
        name = "toy"
        quantization = Accelerator.quantization

    bitsandbytes("0.50.2")
    with pytest.raises(AccelError, match=r"quant_type=nf4: bitsandbytes is not known .* on toy\. .* use device=cpu"):
        Toy().quantization("nf4")
