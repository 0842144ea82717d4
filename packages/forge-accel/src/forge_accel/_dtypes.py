"""torch's dtypes by the names that the settings use."""

from __future__ import annotations

import torch

from forge_accel._errors import AccelError

float32 = torch.float32
"""32-bit floats: the dtype of trained weights, whatever they are computed in. For callers that import no torch."""

bfloat16 = torch.bfloat16
"""16-bit floats with float32's range and 8 bits of precision."""

float16 = torch.float16
"""16-bit floats with 11 bits of precision and a range of 65,504: a dtype for exports, not for training."""

_BY_NAME = {"float32": float32, "bfloat16": bfloat16}


def dtype_named(name: str) -> torch.dtype:
    """Find the dtype of a name.

    Raises:
        AccelError: there is no such dtype to train in.

    """
    if name not in _BY_NAME:
        raise AccelError(f"dtype={name!r} is unknown; known are auto, {', '.join(_BY_NAME)}.")
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Spell a dtype as the settings do: `float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")
