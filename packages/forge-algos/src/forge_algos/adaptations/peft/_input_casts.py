"""LoRA layers that leave their input as it is while autocast is on.

PEFT widens the input of each adapted layer to the float32 of its adapter, and autocast narrows it again: a copy of the
activations for each of seven layers of a block, which the backward pass keeps. The products are the same without.
"""

from typing import Any

import torch
from torch import nn

from forge_algos._modules import causal_model, decoder


def follow_autocast(model: nn.Module) -> None:
    """Let each forward of a PeftModel say to its LoRA layers whether they cast their inputs.

    Without autocast they do, as in PEFT.
    """
    from peft.tuners.lora import LoraLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, LoraLayer)]
    if not layers:
        return

    def follow(module: nn.Module, _args: Any) -> None:
        kind = next(module.parameters()).device.type
        casts = not (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))
        if layers[0].cast_input_dtype_enabled != casts:
            for layer in layers:
                layer.cast_input_dtype_enabled = casts

    # Whichever of them is called: sampling calls the model inside the PeftModel, which itself passes by the hooks of that.
    for module in dict.fromkeys((model, causal_model(model), decoder(model))):
        if module is not None:
            module.register_forward_pre_hook(follow)
