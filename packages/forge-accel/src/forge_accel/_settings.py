"""Settings of the device: dtypes, attention, compilation, kernels. Needs attrs only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs
from attrs import validators

if TYPE_CHECKING:
    from collections.abc import Callable

DType = Literal["auto", "float32", "bfloat16"]
Weights = Literal["float32", "bfloat16"]
AttentionName = Literal["auto", "documents", "flash3", "flash4", "sdpa", "eager"]
Compile = Literal["auto", "blocks", "off"]
Kernels = Literal["auto", "liger", "none"]


def _one_of(literal: Any) -> Callable[..., None]:
    """Return a validator of a Literal's values (a type checker refuses `in_` itself here)."""
    return validators.in_(get_args(literal))


REFUSED_DTYPES = {
    "float16": "float16 ends at 65,504 and loses gradients below 6e-8: they would have to be scaled, and steps whose gradients "
    "overflow thrown away with their rows, which would then be counted as learned. bfloat16 has the range of float32 and needs "
    "neither; a device without bfloat16 units takes float32"
}
"""Dtype that other trainers compute in → why it is none here."""


def _dtype(_: object, field: attrs.Attribute[str], value: object) -> None:
    if isinstance(value, str) and value in REFUSED_DTYPES:
        raise ValueError(f"{field.name}={value}: {REFUSED_DTYPES[value]}. Set dtype=bfloat16 or float32, or leave it out")
    _one_of(DType)(_, field, value)


@attrs.frozen(kw_only=True)
class DeviceSettings:
    """Settings of the device: which one, in which dtypes, with which attention and kernels."""

    device: str = attrs.field(default="auto", validator=[validators.instance_of(str), validators.min_len(1)])
    """Device to compute on: auto (the best one of this machine), or a name: cpu, cuda, rocm, xpu, hpu, npu, mps, that of a
    plug-in; with a number (cuda:1) for one of several."""

    dtype: DType = attrs.field(  # pyrefly: ignore[bad-assignment]
        default="auto", validator=_dtype, metadata={"refused": REFUSED_DTYPES}
    )
    """Number format of the computation. By default float32 on a CPU, bfloat16 on a GPU that computes it natively."""

    weights: Weights = attrs.field(default="float32", validator=_one_of(Weights))
    """Number format of the weights that train. bfloat16 takes 6 bytes a weight for weights, gradients and moments in the place
    of 16: each step is rounded stochastically, moments have 8 bits (optimizer=adamw_8bit), and losses drift from float32's."""

    attention: AttentionName = attrs.field(default="auto", validator=_one_of(AttentionName))  # pyrefly: ignore[bad-assignment]
    """Attention implementation. By default documents: each packed sample attends to itself alone, with no dense mask. flash3
    and flash4 are the same by the kernels of FlashAttention 3 and 4, where they are installed and the chip has them."""

    compile: Compile = attrs.field(default="auto", validator=_one_of(Compile))
    """Compilation by torch.compile: blocks (the decoder's blocks, one graph for all of a kind) or off. By default what was
    measured to win on the device without an adapter or with LoRA: blocks on GPUs of NVIDIA, and on a CPU in runs above half an
    hour; else off."""

    kernels: Kernels = attrs.field(default="auto", validator=_one_of(Kernels))
    """Fused kernels of layers: liger (RMSNorm, SwiGLU and RoPE of liger-kernel, on GPUs) or none, torch's own. By default what
    was measured to win on the device: none so far."""

    def __attrs_post_init__(self) -> None:
        if self.weights == "bfloat16" and self.dtype == "float32":
            raise ValueError("weights=bfloat16 with dtype=float32: such weights compute in bfloat16; leave one of the two out")
