"""Names as drivers give them, and the peaks of the makers' data sheets."""

from __future__ import annotations

import pytest

from forge_accel.devices._peak_flops import peak_of


@pytest.mark.parametrize(
    ("name", "bf16"),
    [
        ("NVIDIA B200", 2250e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("AMD Instinct MI300X", 1307e12),
    ],
)
def test_known_chips(name, bf16):
    """The dense bf16 figure, of the form that the name says."""
    assert peak_of(name).bfloat16 == bf16


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA L40",
        "NVIDIA GB200",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "Tesla T4",
        "NVIDIA A10",
        "H20",
    ],
)
def test_lookalikes_are_unknown(name):
    """No figure is better than a neighbour's."""
    assert peak_of(name) is None
