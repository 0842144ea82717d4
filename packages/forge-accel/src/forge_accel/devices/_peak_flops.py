"""Dense peaks of GPUs for matrix products, from the makers' data sheets, without sparsity."""

from __future__ import annotations

import re
from typing import NamedTuple


class Peak(NamedTuple):
    """Peaks of a chip in FLOP/s; None where the data sheets do not give one."""

    bfloat16: float
    float32: float | None


# The first pattern that matches counts, so variants of a chip come before the chip.
_PEAKS = (
    (r"\bB200\b", Peak(2250e12, None)),
    (r"\bH100 PCIe\b", Peak(756e12, 51e12)),
    (r"\bH100 NVL\b", Peak(835e12, 60e12)),
    (r"\bH200 NVL\b", Peak(835e12, 60e12)),
    (r"\b(H100|H200|GH200)\b", Peak(989e12, 67e12)),
    (r"\bA100\b", Peak(312e12, 19.5e12)),
    (r"\bL40S\b", Peak(362e12, 91.6e12)),
    (r"\bL4\b", Peak(121e12, 30.3e12)),
    (r"\bRTX 4090(?! (D|Laptop))", Peak(165e12, 82.6e12)),
    (r"\bMI300X\b", Peak(1307e12, 163.4e12)),
)


def peak_of(chip: str) -> Peak | None:
    """Look up a chip by the name that its driver reports; None for an unknown one.

    >>> peak_of("NVIDIA H100 80GB HBM3").bfloat16
    989000000000000.0
    >>> peak_of("NVIDIA T4")
    """
    return next((peak for pattern, peak in _PEAKS if re.search(pattern, chip, re.IGNORECASE)), None)
