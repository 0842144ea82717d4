"""Checks of bitsandbytes for a frozen base model in 4 bits. Loads neither it nor torch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from forge_accel._choice import Choice
from forge_accel._errors import AccelError

QUANT_TYPES = {"nf4": "4-bit NormalFloat", "fp4": "4-bit floats"}
"""The 4-bit types of bitsandbytes."""

_OLDEST = (0, 50)
"""The first bitsandbytes with kernels for CPUs that were tried."""


def check_quant_type(quant_type: str) -> None:
    """Check the name of a 4-bit type.

    Raises:
        AccelError: there is no such `quant_type`.

    """
    if quant_type not in QUANT_TYPES:
        raise AccelError(f"quant_type={quant_type!r} is unknown: use {' or '.join(QUANT_TYPES)}.")


def check_quantization(quant_type: str) -> str:
    """Check that bitsandbytes can be used; return its version.

    Raises:
        AccelError: there is no such `quant_type`, or bitsandbytes is missing or too old.

    """
    check_quant_type(quant_type)
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


def choose_quantization(quant_type: str, there: tuple[str, ...], device: str) -> Choice[str]:
    """Choose a 4-bit type on an untried device, for which bitsandbytes documents `there`.

    Raises:
        AccelError: there is no such `quant_type`, not on this device, or bitsandbytes is missing or too old.

    """
    check_quant_type(quant_type)
    if quant_type not in there:
        raise refuse_quantization(quant_type, f"{device} (it documents {' and '.join(there)} there)" if there else device)
    found = check_quantization(quant_type)
    return Choice(quant_type, f"{quant_type}: bitsandbytes {found} holds the frozen weights in 4 bits; untried on {device}")


def refuse_quantization(quant_type: str, device: str) -> AccelError:
    """Return the error for a device that bitsandbytes has no kernels for.

    It names the CPU, which every machine has: what other devices can is known in their own files.
    """
    return AccelError(
        f"quant_type={quant_type}: bitsandbytes is not known to hold these 4 bits on {device}. It does on every CPU: use "
        "device=cpu, or a base that is not quantized (adapter=lora)."
    )
