"""A model on the host, computed on a device that has room for one of its layers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from forge_dist.loading._moving import exchange


@contextmanager
def streamed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Compute on `device` inside the block.

    Each layer is there while it computes, what is outside of the layers all the time.

    Layers are the modules of the model's outermost lists, which hold nearly all of its weights. Afterwards every tensor is the
    one on the host that it was before. Gradients are not computed.
    """
    tensors = Tensors(device)
    layers = list(layers_of(model))
    inside = {id(tensor) for layer in layers for tensor in _tensors(layer)}
    hooks = []
    for layer in layers:
        own = _tensors(layer)
        hooks.append(layer.register_forward_pre_hook(lambda *_, own=own: tensors.fetch(own)))
        hooks.append(layer.register_forward_hook(lambda *_, own=own: tensors.put_back(own), always_call=True))
    try:
        tensors.fetch([tensor for tensor in _tensors(model) if id(tensor) not in inside])
        yield
    finally:
        for hook in hooks:
            hook.remove()
        tensors.put_back(_tensors(model))


class Tensors:
    """Tensors of a model, each on the host or for a while on the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_host: dict[int, torch.Tensor] = {}

    def fetch(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy tensors to the device, under the same names."""
        for tensor in tensors:
            if id(tensor) not in self._on_host:
                self._on_host[id(tensor)] = exchange(tensor, tensor.data.to(self._device))

    def put_back(self, tensors: Iterable[torch.Tensor]) -> None:
        """Make tensors the ones on the host again; the copies are dropped."""
        for tensor in tensors:
            if (data := self._on_host.pop(id(tensor), None)) is not None:
                exchange(tensor, data)


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """Iterate over the modules of the outermost lists of modules."""
    for child in model.children():
        if isinstance(child, nn.ModuleList):
            yield from child
        else:
            yield from layers_of(child)


def _tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]
