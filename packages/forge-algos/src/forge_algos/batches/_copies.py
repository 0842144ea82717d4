"""Copies of a batch's arrays to the device, from page-locked memory where that is faster."""

from typing import Any

import numpy as np
import torch

_pinned = False


def pin_batches(enabled: bool) -> None:
    """Have every later copy of a batch in this process go through page-locked memory, or not.

    A copy from pageable memory that is larger than 64 KiB waits for all that the device still has to do; one from page-locked
    memory does not, and torch keeps the memory for the next. Off by default. Only for devices that `torch.Tensor.pin_memory`
    serves: `forge_accel` says which (`Accelerator.pins_memory`).
    """
    global _pinned  # noqa: PLW0603 - a process computes on one device
    _pinned = bool(enabled)


def to_device(array: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Copy numbers to a device as `dtype`; the host does not wait for the device.
    The array may be a read-only view of a file, which no tensor may share.
    """
    copied = torch.tensor(np.asarray(array), dtype=dtype)
    # Not one without numbers, as of a memory plan.
    if _pinned and torch.device(device).type != "cpu" and type(copied) is torch.Tensor:
        copied = copied.pin_memory()
    return copied.to(device, non_blocking=True)
