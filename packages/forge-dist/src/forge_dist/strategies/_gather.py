"""A divided model → its tensors, whole, one at a time, on rank 0."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_dist.strategies._wrappers import resharded


def whole_tensors(model: nn.Module, device: torch.device, *, is_first: bool) -> Iterator[tuple[str, torch.Tensor | None]]:
    """`Strategy.whole` of a model whose parameters are tensors and DTensors. Beyond the shards, one tensor is held on a device."""
    model = resharded(model)
    seen: set[int] = set()
    with torch.no_grad():
        # keep_vars: a tied weight is the same object under each of its names.
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            together = _together(tensor.detach(), device)
            yield name, together.cpu() if is_first else None


def _together(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # Shards that are kept in the host's memory go to the device first: its backend may not carry tensors of the host.
    on_device: torch.Tensor = tensor.to(device)
    assert isinstance(on_device, DTensor)
    return on_device.full_tensor()
