"""Checks of bitsandbytes for a frozen base model in 4 or 8 bits. Loads neither it nor torch."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

from forge_accel._choice import Choice
from forge_accel._errors import AccelError

BITS = {"nf4": 4, "fp4": 4, "int8": 8}
"""The types of bitsandbytes → bits of a weight: NormalFloat, floats, integers with a scale for each row."""

_OLDEST = (0, 50)
"""The first bitsandbytes with kernels for CPUs that were tried."""


def check_quant_type(quant_type: str) -> None:
    """Check the name of a type of weights.

    Raises:
        AccelError: there is no such `quant_type`.

    """
    if quant_type not in BITS:
        raise AccelError(f"quant_type={quant_type!r} is unknown: use {', '.join(list(BITS)[:-1])} or {list(BITS)[-1]}.")


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
    """Choose a type on an untried device, for which bitsandbytes documents `there`.

    Raises:
        AccelError: there is no such `quant_type`, not on this device, or bitsandbytes is missing or too old.

    """
    check_quant_type(quant_type)
    if quant_type not in there:
        raise refuse_quantization(quant_type, f"{device} (it documents {' and '.join(there)} there)" if there else device)
    found = check_quantization(quant_type)
    return Choice(quant_type, f"{held(quant_type, found)}; untried on {device}")


def held(quant_type: str, found: str) -> str:
    """Return the first words of a reason: bitsandbytes' version and the bits of a weight."""
    return f"{quant_type}: bitsandbytes {found} holds the frozen weights in {BITS[quant_type]} bits"


def refuse_quantization(quant_type: str, device: str) -> AccelError:
    """Return the error for a device that bitsandbytes has no kernels for.

    It names the CPU, which every machine has: what other devices can is known in their own files.
    """
    return AccelError(
        f"quant_type={quant_type}: bitsandbytes is not known to hold these {BITS[quant_type]} bits on {device}. It does on "
        "every CPU: use device=cpu, or a base that is not quantized (adapter=lora)."
    )
