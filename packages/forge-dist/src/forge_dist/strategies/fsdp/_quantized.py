"""Quantized bases under FSDP2: sharded after every rank read them and attached an adapter.

transformers can quantize a model while it reads it, or shard it, not both. And PEFT looks at such a layer for bitsandbytes'
attributes of its weight. So every rank reads the base whole, and it is sharded once the adapter is there; the adapter stays
whole.
"""

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from forge_dist.loading._fsdp_groups import RESHARDED, fsdp_groups, without_shared
from forge_dist.loading._parallel_plan import wildcard
from forge_dist.loading._quantization import four_bit_layers, int8_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def shard_quantized(
    model: "PreTrainedModel", *, device: torch.device, sizes: tuple[int, int], cpu_offload: bool, media: bool = False
) -> None:
    """Shard every parameter of `model` that is not trained, in place; collective.

    The codes of a weight are sharded like any tensor; the few constants that scale them (0.01 to 0.5 bits a weight) stay whole
    on every rank. `sizes` are the number of copies, and the ranks that share one; `media` as of `without_shared`.
    """
    shape = sizes[-1:] if sizes[0] == 1 else sizes
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    policy = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    layers = four_bit_layers(model).values()
    states = [layer.weight.quant_state for layer in layers]
    rules = fsdp_groups(model)
    groups = {name: rules[rule] for name, _ in model.named_modules() if (rule := wildcard(name)) in rules}
    for name, style in without_shared(model, groups, media=media).items():
        fully_shard(
            model.get_submodule(name),
            mesh=mesh,
            reshard_after_forward=style == RESHARDED,
            offload_policy=policy,
            ignored_params=trained,
        )
    fully_shard(model, mesh=mesh, offload_policy=policy, ignored_params=trained)
    for layer, state in zip(layers, states, strict=True):
        # A shard lacks the attribute with its scales: bitsandbytes reads the layer's one next, and saves the weight's one.
        layer.quant_state = state
        layer.weight.quant_state = state
    for layer in int8_layers(model).values():
        layer.weight.SCB = layer.scales


def awaits_sharding(model: nn.Module) -> bool:
    """Return whether `model` is quantized and not yet sharded by `shard_quantized`."""
    quantized = four_bit_layers(model) or int8_layers(model)
    return bool(quantized) and not any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
