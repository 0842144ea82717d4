"""Gather the tensors of a divided model one at a time, whole, on rank 0."""

from collections.abc import Collection, Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_dist._third_party_logs import quiet_redistribution
from forge_dist.strategies._wrappers import resharded


def whole_tensors(
    model: nn.Module, device: torch.device, names: Collection[str] | None, *, is_first: bool
) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Iterate as `Strategy.whole`, over a model of plain tensors and DTensors.

    Beyond the shards, one whole tensor is held on a device.
    """
    model = resharded(model)
    seen: set[int] = set()
    with torch.no_grad():
        # keep_vars: a tied weight is the same object under each of its names.
        for name, tensor in model.state_dict(keep_vars=True).items():
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if names is not None and name not in names:
                continue
            whole = _gathered(tensor.detach(), device)
            yield name, whole.cpu() if is_first else None


def _gathered(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    # Shards in the host's memory go to the device first: its backend may not communicate tensors of the host.
    on_device: torch.Tensor = tensor.to(device)
    assert isinstance(on_device, DTensor)
    with quiet_redistribution():
        return on_device.full_tensor()
