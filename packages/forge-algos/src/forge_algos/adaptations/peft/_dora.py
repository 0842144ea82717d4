"""DoRA's magnitudes, the lengths of the base's rows (arXiv 2402.09353), also if divided."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from forge_algos._errors import AdapterError


@contextmanager
def dora_attached(model: nn.Module, targets: Sequence[str]) -> Iterator[None]:
    """Wrap PEFT's attaching of DoRA, so that divided weights are handled. Collective for these.

    PEFT 0.21 adds a whole update to a shard as it begins, which torch refuses; so it gets zeros without memory for divided
    weights, and the magnitudes are set afterwards, with one weight whole at a time.

    Raises:
        AdapterError: the weights are only placeholders, as under hsdp, or absent, as under ZeRO-3.
    """
    divided: list[tuple[Any, DTensor]] = []
    for name in targets:
        module: Any = model.get_submodule(name)
        weight = module.weight
        if isinstance(weight, DTensor):
            divided.append((module, weight))
        elif not weight.numel() or 0 in weight.stride():
            raise AdapterError(
                "adapter=dora reads the base's weights as it begins, and strategy=hsdp and zero3 have them nowhere whole "
                "then: use strategy=fsdp2, ddp or zero2, or adapter=lora"
            )
    try:
        for module, weight in divided:
            module.weight = nn.Parameter(weight.to_local().new_zeros(()).expand(weight.shape), requires_grad=False)
        yield
    finally:
        for module, weight in divided:
            weight.requires_grad = False
            module.weight = weight
    for name in targets if divided else ():
        layer: Any = model.get_submodule(name)
        weight = layer.get_base_layer().weight
        for adapter, magnitude in layer.lora_magnitude_vector.items():
            with torch.no_grad():
                # A fresh adapter adds exactly 0.
                whole, nothing = weight.full_tensor(), weight.to_local().new_zeros(())
                magnitude.weight.copy_(magnitude.get_weight_norm(whole, nothing, layer.scaling[adapter]))
