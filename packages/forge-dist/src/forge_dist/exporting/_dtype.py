"""A model's state → the same state in the float type of an export. The model in memory is left alone."""

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from forge_dist.exporting._plain import left
from forge_dist.exporting._plain_from_plain import Plain, made_plain

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def cast_state_dict(
    model: "PreTrainedModel", dtype: torch.dtype | None, *, without: Sequence[str] = (), plain: Plain | None = None
) -> dict[str, torch.Tensor]:
    """Name → tensor of `model.state_dict()`, plain and floats as `dtype`; what needs no change is the model's own tensor, not a copy.

    What changes lies on the CPU, so that a full device can still be exported. Tied weights are changed once and stay tied, for
    save_pretrained finds them by their storage. The modules `without` are left out.

    Raises:
        ValueError: a tensor is on the meta device: its data is elsewhere.
    """
    stored = stored_dtype(model, dtype)
    made: dict[tuple[object, ...], torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    for name, tensor in left(model.state_dict(), without).items():
        if tensor.is_meta:
            raise ValueError(f"the tensor {name} is offloaded (meta device); load the model whole to export it")
        target = stored(name, tensor)
        if plain is None and tensor.dtype == target:
            state[name] = tensor
            continue
        key = (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride())
        if key not in made:
            whole = made_plain(plain, name, tensor)
            made[key] = tensor if whole is tensor and tensor.dtype == target else whole.to(device="cpu", dtype=target)
        state[name] = made[key]
    return state


def stored_dtype(model: "PreTrainedModel", dtype: torch.dtype | None) -> Callable[[str, torch.Tensor], torch.dtype]:
    """What tells, of a name in the model's state and its tensor, the type in which an export as `dtype` holds it."""
    kept = _kept_in_float32(model, dtype)

    def stored(name: str, tensor: torch.Tensor) -> torch.dtype:
        if dtype is None or not tensor.is_floating_point() or (kept and kept.search(name)):
            return tensor.dtype
        return dtype

    return stored


def _kept_in_float32(model: "PreTrainedModel", dtype: torch.dtype | None) -> re.Pattern[str] | None:
    """What matches the tensors that transformers loads as float32 whatever is asked for (routers' biases, for example)."""
    if dtype not in (torch.float16, torch.bfloat16):
        return None
    names = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        names |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    alternatives = "|".join(re.escape(name).replace(r"\*", ".*") for name in sorted(names))
    return re.compile(rf"(^|\.)({alternatives})(\.|$)") if alternatives else None
