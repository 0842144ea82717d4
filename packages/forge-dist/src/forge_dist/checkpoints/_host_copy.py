"""Tensors on any device → copies of them in host memory that is used again for the next save."""

from collections.abc import Mapping

import torch


class HostCopy:
    """Keeps its memory between copies: fresh pages would cost more time than the copying, while the training waits."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Name → copy on the host, contiguous, complete when this returns. The copies taken before are overwritten."""
        buffers = {}
        away = False
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                # Pages that cannot move are copied to several times faster, and without waiting for each tensor.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
            away = away or tensor.device.type != "cpu"
            buffers[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        if away:
            torch.accelerator.synchronize()
        self._buffers = buffers
        return dict(buffers)
