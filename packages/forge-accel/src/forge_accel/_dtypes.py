"""Names of number formats → torch's."""

from __future__ import annotations

import torch

from forge_accel._errors import AccelError

float32 = torch.float32
"""What trained weights are held in, whatever they are computed in; here so that a caller needs no torch of its own."""

bfloat16 = torch.bfloat16
"""The half-sized format with float32's range."""

float16 = torch.float16
"""The half-sized format with more digits and a range of 65,504: models are written in it, and not trained."""

_BY_NAME = {"float32": float32, "bfloat16": bfloat16}


def dtype_named(wish: str) -> torch.dtype:
    """Find the dtype called `wish`.

    Raises:
        AccelError: there is none of that name here.

    """
    if wish not in _BY_NAME:
        raise AccelError(f"dtype={wish!r} is unknown; known are auto, {', '.join(_BY_NAME)}.")
    return _BY_NAME[wish]


def dtype_name(dtype: torch.dtype) -> str:
    """Spell a dtype as the settings do: `float32`, not `torch.float32`."""
    return str(dtype).removeprefix("torch.")
