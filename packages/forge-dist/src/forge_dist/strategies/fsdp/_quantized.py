"""A base in 4 bits that every rank holds whole → the same, divided over the ranks by FSDP2, and the adapter beside it whole.

transformers can quantize a model while it reads it, or divide it, not both. And PEFT looks at a layer in 4 bits for what bitsandbytes noted on its
weight. So every rank reads the base whole, and it is divided once the adapter is there.
"""

import re
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from forge_dist.loading._fsdp_groups import FREED, groups
from forge_dist.loading._quantization import four_bit_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def divide_quantized(
    model: "PreTrainedModel", *, device: torch.device, world_size: int, shard_size: int, cpu_offload: bool
) -> None:
    """Divide every parameter of `model` that is not trained, in place; collective.

    The codes of a weight are divided like any tensor; the few constants that scale them (0.13 to 0.5 bits a weight) stay whole on every rank.
    """
    sizes = (world_size,) if shard_size == world_size else (world_size // shard_size, shard_size)
    mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    policy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    layers = four_bit_layers(model).values()
    states = [layer.weight.quant_state for layer in layers]
    for rule, style in groups(model).items():
        spelled = re.compile(re.escape(rule).replace(r"\*", r"\d+"))
        for name, module in model.named_modules():
            if spelled.fullmatch(name):
                fully_shard(
                    module, mesh=mesh, reshard_after_forward=style == FREED, offload_policy=policy, ignored_params=trained
                )
    fully_shard(model, mesh=mesh, offload_policy=policy, ignored_params=trained)
    for layer, state in zip(layers, states, strict=True):
        # A shard has no note of how it is scaled: the layer's own is what bitsandbytes looks at next, and the weight's what it saves.
        layer.quant_state = state
        layer.weight.quant_state = state


def is_undivided(model: nn.Module) -> bool:
    """Whether `model` is quantized and waits for `divide_quantized`."""
    return bool(four_bit_layers(model)) and not any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
