"""What a person may ask of a machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import attrs
from attrs import validators

if TYPE_CHECKING:
    from collections.abc import Callable

DType = Literal["auto", "float32", "bfloat16"]
AttentionName = Literal["auto", "documents", "sdpa", "eager"]


def _one_of(literal: Any) -> Callable[..., None]:
    """Make a validator that takes a Literal's values only; a type checker cannot see that `in_` does."""
    return validators.in_(get_args(literal))


@attrs.frozen(kw_only=True)
class DeviceSettings:
    """Which device, in which numbers, with which attention."""

    device: str = attrs.field(default="auto", validator=[validators.instance_of(str), validators.min_len(1)])
    """Where to compute: auto (the best device of this machine), cpu, cuda, cuda:1, or a name that a plug-in registers."""

    dtype: DType = attrs.field(default="auto", validator=_one_of(DType))
    """Number format of the computation. By default what the device is good at: float32 on a CPU, bfloat16 on a GPU that has it."""

    attention: AttentionName = attrs.field(default="auto", validator=_one_of(AttentionName))
    """Attention implementation. By default documents: each packed sample attends to itself alone, with no dense mask."""
