"""A machine to what it can do: device, collective backend, dtype, memory, RNG, attention.

A lazy door: importing `forge_accel`, or its settings, loads no torch; asking for a machine does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_accel._choice import Choice
    from forge_accel._dtypes import bfloat16, float16, float32
    from forge_accel._errors import AccelError, AttentionError, ForgeAccelError
    from forge_accel._settings import DeviceSettings
    from forge_accel.attention._attention import Attention
    from forge_accel.attention._documents import document_attention
    from forge_accel.devices._accelerator import Accelerator
    from forge_accel.devices._cpu import CPUAccelerator
    from forge_accel.devices._cuda import CUDAAccelerator
    from forge_accel.devices._describe import Row, describe
    from forge_accel.devices._registry import accelerator, device_count

__version__ = "0.4.0"

__all__ = [
    "AccelError",
    "Accelerator",
    "Attention",
    "AttentionError",
    "CPUAccelerator",
    "CUDAAccelerator",
    "Choice",
    "DeviceSettings",
    "ForgeAccelError",
    "Row",
    "accelerator",
    "bfloat16",
    "describe",
    "device_count",
    "document_attention",
    "float16",
    "float32",
]

_HOMES = {
    "AccelError": "_errors",
    "Accelerator": "devices._accelerator",
    "Attention": "attention._attention",
    "AttentionError": "_errors",
    "CPUAccelerator": "devices._cpu",
    "CUDAAccelerator": "devices._cuda",
    "Choice": "_choice",
    "DeviceSettings": "_settings",
    "ForgeAccelError": "_errors",
    "Row": "devices._describe",
    "accelerator": "devices._registry",
    "bfloat16": "_dtypes",
    "describe": "devices._describe",
    "device_count": "devices._registry",
    "document_attention": "attention._documents",
    "float16": "_dtypes",
    "float32": "_dtypes",
}


def __getattr__(name: str) -> object:
    """Load a public name when it is first asked for."""
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
