"""The dtype in which an export stores each tensor."""

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def stored_dtype(model: "PreTrainedModel", dtype: torch.dtype | None) -> Callable[[str, torch.Tensor], torch.dtype]:
    """Return a function: (name in the model's state, tensor) → dtype in an export as `dtype`."""
    kept = _kept_in_float32(model, dtype)

    def stored(name: str, tensor: torch.Tensor) -> torch.dtype:
        if dtype is None or not tensor.is_floating_point() or (kept and kept.search(name)):
            return tensor.dtype
        return dtype

    return stored


def _kept_in_float32(model: "PreTrainedModel", dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """Return the pattern of tensors that transformers always loads as float32.

    Routers' biases, for example.
    """
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    alternatives = "|".join(re.escape(name).replace(r"\*", ".*") for name in sorted(names))
    return re.compile(rf"(^|\.)({alternatives})(\.|$)") if alternatives else None
