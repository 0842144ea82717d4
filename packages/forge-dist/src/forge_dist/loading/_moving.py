"""Model or tensor on one device → the same on another, tied parameters tied."""

from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def moved(model: M, device: torch.device | str) -> M:
    """Move a model to `device`, with its tied parameters tied.

    For a device whose tensors cannot take the place of the CPU's (Ascend's NPUs, meta) `Module.to` makes new parameters, one
    for each module that shares one.
    """
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
    model = model.to(device)
    for (first, own), *others in owners.values():
        for module, name in others:
            module._parameters[name] = first._parameters[own]
    return model


def exchange(tensor: torch.Tensor, data: torch.Tensor) -> torch.Tensor:
    """Give a tensor other data, perhaps of another device, and return what it had.

    The tensor, or parameter, stays the same object for modules and optimizers that hold it. Before a backward pass has seen it:
    where a device's tensors cannot take the place of the CPU's (Ascend's NPUs, meta), torch swaps the two whole, which it
    refuses to do with one that a graph holds.

    Raises:
        RuntimeError: torch cannot swap them.
    """
    before = tensor.data
    try:
        tensor.data = data
    except RuntimeError:
        if isinstance(tensor, nn.Parameter) and not isinstance(data, nn.Parameter):
            data = nn.Parameter(data, requires_grad=tensor.requires_grad)
        torch.utils.swap_tensors(tensor, data)
        return data
    return before
