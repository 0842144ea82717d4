"""Description of a machine for a log: each decision with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from forge_accel._dtypes import dtype_name

if TYPE_CHECKING:
    from forge_accel._settings import DeviceSettings
    from forge_accel.devices._accelerator import Accelerator


class Row(NamedTuple):
    """Decision on one property of the machine."""

    what: str
    """Property: `device`, `dtype`, ..."""

    value: str
    """Value that was decided on."""

    reason: str
    """Reason, in one sentence."""


def describe(acc: Accelerator, settings: DeviceSettings) -> list[Row]:
    """Describe the machine and the decisions for these settings.

    Args:
        acc: The accelerator that `accelerator(settings.device)` found.
        settings: The requested dtype and attention.

    Raises:
        AccelError: a dtype or attention that the accelerator does not know.

    """
    dtype = acc.dtype(settings.dtype)
    attention = acc.attention(settings.attention, dtype.value)
    backend, fused = acc.collective_backend, acc.fused_optimizer
    return [
        Row("machine", acc.machine, f"torch {torch.__version__}, {torch.get_num_threads()} CPU threads"),
        Row("device", str(acc.device.value), acc.device.reason),
        Row("dtype", dtype_name(dtype.value), dtype.reason),
        Row("attention", attention.value.name, attention.reason),
        Row("fused_optimizer", str(fused.value), fused.reason),
        Row("collective_backend", backend.value, backend.reason),
        Row(
            "default_tokens",
            str(acc.default_tokens),
            f"{acc.default_tokens} tokens a micro-batch: a cautious start for {acc.name}",
        ),
        Row("support", acc.support.value, acc.support.reason),
    ]
