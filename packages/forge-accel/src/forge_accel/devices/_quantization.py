"""A wish for weights in 4 bits → bitsandbytes' version, or the error that says why it cannot be. Loads neither it nor torch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from forge_accel._errors import AccelError

QUANT_TYPES = {"nf4": "4-bit NormalFloat", "fp4": "4-bit floats"}

_OLDEST = (0, 50)
"""bitsandbytes with kernels for CPUs that were tried."""


def check_quantization(quant_type: str) -> str:
    """Return bitsandbytes' version.

    Raises:
        AccelError: `quant_type` is none, or bitsandbytes is missing or too old.

    """
    if quant_type not in QUANT_TYPES:
        raise AccelError(f"quant_type={quant_type!r} is unknown: use {' or '.join(QUANT_TYPES)}.")
    needed = f"bitsandbytes>={_OLDEST[0]}.{_OLDEST[1]}"
    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:
        raise AccelError(
            f"quant_type={quant_type} needs bitsandbytes, which is not installed: `pip install '{needed}'`."
        ) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < _OLDEST:
        raise AccelError(f"quant_type={quant_type} needs {needed}, and {found} is installed: `pip install -U '{needed}'`.")
    return found


def refuse_quantization(quant_type: str, device: str) -> AccelError:
    """Say what can hold 4 bits where `device` cannot."""
    return AccelError(
        f"quant_type={quant_type}: {device} is no device on which bitsandbytes is known to hold 4 bits. The CPU is, and every GPU of CUDA with "
        "compute capability 6.0 or newer: use device=cpu or cuda, or a base that is not quantized (adapter=lora)."
    )
