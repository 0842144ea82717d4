"""Settings of the device: device, dtype, attention, compilation, kernels. Needs attrs only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs
from attrs import validators

if TYPE_CHECKING:
    from collections.abc import Callable

DType = Literal["auto", "float32", "bfloat16"]
AttentionName = Literal["auto", "documents", "flash3", "flash4", "sdpa", "eager"]
Compile = Literal["auto", "blocks", "off"]
Kernels = Literal["auto", "liger", "none"]


def _one_of(literal: Any) -> Callable[..., None]:
    """Return a validator of a Literal's values (a type checker refuses `in_` itself here)."""
    return validators.in_(get_args(literal))


@attrs.frozen(kw_only=True)
class DeviceSettings:
    """Settings of the device: which one, in which dtype, with which attention and kernels."""

    device: str = attrs.field(default="auto", validator=[validators.instance_of(str), validators.min_len(1)])
    """Device to compute on: auto (the best one of this machine), or a name: cpu, cuda, rocm, xpu, hpu, npu, mps, that of a
    plug-in; with a number (cuda:1) for one of several."""

    dtype: DType = attrs.field(default="auto", validator=_one_of(DType))
    """Number format of the computation. By default float32 on a CPU, bfloat16 on a GPU that computes it natively."""

    attention: AttentionName = attrs.field(default="auto", validator=_one_of(AttentionName))  # pyrefly: ignore[bad-assignment]
    """Attention implementation. By default documents: each packed sample attends to itself alone, with no dense mask. flash3
    and flash4 are the same by the kernels of FlashAttention 3 and 4, where they are installed and the chip has them."""

    compile: Compile = attrs.field(default="auto", validator=_one_of(Compile))
    """Compilation by torch.compile: blocks (the decoder's blocks, one graph for all of a kind) or off. By default what was
    measured to win on the device: off so far."""

    kernels: Kernels = attrs.field(default="auto", validator=_one_of(Kernels))
    """Fused kernels of layers: liger (RMSNorm, SwiGLU and RoPE of liger-kernel, on GPUs) or none, torch's own. By default what
    was measured to win on the device: none so far."""
