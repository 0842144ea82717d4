"""Device of a machine: dtype, attention, collective backend, memory, random generators.

Names are imported when they are first used: importing `forge_accel`, or its settings, loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from forge_accel._choice import Choice as Choice
    from forge_accel._dtypes import bfloat16 as bfloat16, float16 as float16, float32 as float32
    from forge_accel._errors import (
        AccelError as AccelError,
        AttentionError as AttentionError,
        ForgeAccelError as ForgeAccelError,
    )
    from forge_accel._settings import DeviceSettings as DeviceSettings
    from forge_accel.attention._attention import Attention as Attention
    from forge_accel.attention._documents import document_attention as document_attention
    from forge_accel.devices._accelerator import Accelerator as Accelerator
    from forge_accel.devices._cpu import CPUAccelerator as CPUAccelerator
    from forge_accel.devices._cuda import CUDAAccelerator as CUDAAccelerator
    from forge_accel.devices._describe import Row as Row, describe as describe
    from forge_accel.devices._hpu import HPUAccelerator as HPUAccelerator
    from forge_accel.devices._memory import MemoryMeter as MemoryMeter, asked_bytes as asked_bytes
    from forge_accel.devices._mps import MPSAccelerator as MPSAccelerator
    from forge_accel.devices._npu import NPUAccelerator as NPUAccelerator
    from forge_accel.devices._registry import accelerator as accelerator, device_count as device_count
    from forge_accel.devices._rocm import ROCMAccelerator as ROCMAccelerator
    from forge_accel.devices._xpu import XPUAccelerator as XPUAccelerator
    from forge_accel.fused._compiled_blocks import CompiledBlocks as CompiledBlocks
    from forge_accel.fused._liger import Replaced as Replaced, use_liger as use_liger

__version__ = "0.4.0"

# Each module with the public names that it defines; a module is imported when one of its names is first used.
_PUBLIC = {
    "_choice": "Choice",
    "_dtypes": "bfloat16 float16 float32",
    "_errors": "AccelError AttentionError ForgeAccelError",
    "_settings": "DeviceSettings",
    "attention._attention": "Attention",
    "attention._documents": "document_attention",
    "devices._accelerator": "Accelerator",
    "devices._cpu": "CPUAccelerator",
    "devices._cuda": "CUDAAccelerator",
    "devices._describe": "Row describe",
    "devices._memory": "MemoryMeter asked_bytes",
    "devices._hpu": "HPUAccelerator",
    "devices._mps": "MPSAccelerator",
    "devices._npu": "NPUAccelerator",
    "devices._registry": "accelerator device_count",
    "devices._rocm": "ROCMAccelerator",
    "devices._xpu": "XPUAccelerator",
    "fused._compiled_blocks": "CompiledBlocks",
    "fused._liger": "Replaced use_liger",
}
_MODULE_OF = {name: module for module, names in _PUBLIC.items() for name in names.split()}
__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> object:
    """Import a public name when it is first used."""
    if name not in _MODULE_OF:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return [*__all__, "__version__"]
