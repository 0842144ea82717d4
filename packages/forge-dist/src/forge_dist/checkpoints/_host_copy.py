"""Copy tensors of any device to host memory that is reused for the next save."""

from collections.abc import Mapping

import torch


class HostCopy:
    """Reusable host memory.

    Fresh pages would take more time than the copying, while the training waits.
    """

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def missing(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Return the bytes of host memory that a copy of `tensors` takes beyond what is here."""
        return sum(tensor.nbytes for name, tensor in tensors.items() if not _fits(self._buffers.get(name), tensor))

    def take(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return name → copy on the host, contiguous and complete; earlier copies are overwritten."""
        buffers = {}
        from_device = False
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or not _fits(buffer, tensor):
                # Copies to pinned pages are several times faster, and need not wait for each tensor.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type != "cpu")
            from_device = from_device or tensor.device.type != "cpu"
            buffers[name] = buffer.copy_(tensor.detach(), non_blocking=True)
        if from_device:
            torch.accelerator.synchronize()
        self._buffers = buffers
        return dict(buffers)


def _fits(buffer: torch.Tensor | None, tensor: torch.Tensor) -> bool:
    return buffer is not None and buffer.shape == tensor.shape and buffer.dtype == tensor.dtype
