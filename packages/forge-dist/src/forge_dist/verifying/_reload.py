"""Reloading of an export, divided where the model is; and copying weights into it."""

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from forge_dist._host_memory import room_for
from forge_dist.adapters._adapter import AttachAdapter, active_adapter, base_path, read_adapter
from forge_dist.adapters._base_model import adapter_base
from forge_dist.exporting._layout import WholeTensors, first_names, owners_of
from forge_dist.loading._modalities import language_dtype
from forge_dist.loading._quantization import quantization_of
from forge_dist.loading._task import is_sequence_classifier, task_of
from forge_dist.loading._unwrap import base_of, is_partitioned, is_peft
from forge_dist.ranks._errors_on_all_ranks import errors_on_all_ranks, exhausted
from forge_dist.strategies._choose import make_strategy
from forge_dist.strategies._grad_norm import local
from forge_dist.strategies._replicated import unshard_copied_modules
from forge_dist.strategies._torch import one_process
from forge_dist.strategies._virtual_tokens import gather_before_lookup
from forge_dist.strategies.fsdp._placeholders import WholeShapePlaceholders
from forge_dist.strategies.zero._parameters import copy_partitioned, fill_partitioned

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

    from forge_dist.strategies._strategy import Strategy


def reload_export(
    model: "PreTrainedModel | PeftModel",
    path: Path,
    strategy: "Strategy",
    errors: tuple[type[Exception], ...],
    cannot: str,
    attach: AttachAdapter | None = None,
) -> "PreTrainedModel | PeftModel":
    """Load the export at `path`, in the dtype, quantized and divided as `model`; collective.

    A device other than the host may have no room for a second copy beside the optimizer: the copy, or each rank's shards of it,
    is on the host. So `streamed` computes with it. A quantized base can only be made on the device.

    In bfloat16 on a CPU the comparison would take ten times as long; values that were stored as bfloat16 are exact in float32.
    `attach` puts an adapter on a divided base, in place of PEFT.

    Raises:
        ExportError: `errors` on any rank, with `cannot` before the message.
    """
    base = base_of(model)
    with errors_on_all_ranks(strategy.ranks, errors, cannot):
        model_path = str(path)
        if is_peft(model):
            # Comparing the base's identity reads all of it: once.
            model_path = base_path(path) if strategy.ranks.is_first else adapter_base(path).path
    with errors_on_all_ranks(strategy.ranks, errors, cannot):
        quantization = quantization_of(base)
        loader = _loader(strategy, quantized=quantization is not None, adapter=is_peft(model))
        if loader.device != strategy.device:
            _require_room(base, strategy)
        dtype = language_dtype(base)
        below = loader.load(model_path, dtype=dtype, attention=None, task=task_of(base), quantization=quantization)
    with errors_on_all_ranks(strategy.ranks, errors, cannot):
        reloaded = _read_adapter(below, path, active_adapter(model), attach) if is_peft(model) else below
    gather_before_lookup(reloaded)
    return reloaded


def _loader(strategy: "Strategy", *, quantized: bool, adapter: bool) -> "Strategy":
    """Return the strategy that loads the copy.

    It divides as the model is divided, on the host where the model is on another device.
    """
    beside = strategy.device.type != "cpu" and not quantized
    if beside and not strategy.divides:
        return one_process(torch.device("cpu"))
    offloads = beside and strategy.name in _OFFLOADED and not strategy.settings.cpu_offload
    if not adapter and not offloads:
        return strategy
    settings = attrs.evolve(strategy.settings, strategy=strategy.name, cpu_offload=strategy.settings.cpu_offload or offloads)
    loader = make_strategy(settings, strategy.ranks, device=strategy.device, adapter=False)
    loader.media = strategy.media
    return loader


_OFFLOADED = ("fsdp2", "hsdp", "zero3")
"""Strategies whose shards may lie on the host, and are computed with on the device."""


def _require_room(base: "PreTrainedModel", strategy: "Strategy") -> None:
    """Raise MemoryError on all ranks where a host would kill one of them for the copy."""
    size = sum(tensor.nbytes for tensor in (*base.parameters(), *base.buffers()))
    if strategy.ranks.any(not room_for(size, sharing=strategy.ranks.local_world_size)):
        raise MemoryError(
            f"the host has no room for the {size / 2**30:.1f} GiB of the model as it was read back; its files hold the bits of "
            "the model in memory"
        )


def _read_adapter(base: "PreTrainedModel", path: Path, name: str, attach: AttachAdapter | None) -> "PeftModel":
    from peft import PeftConfig

    if attach is not None and any(isinstance(p, DTensor) or is_partitioned(p) for p in base.parameters()):
        return read_adapter(base, path, name, attach)
    # DoRA's magnitudes begin as the norms of the base's rows, which PEFT cannot compute from shards.
    dora = getattr(PeftConfig.from_pretrained(str(path)), "use_dora", False)
    meshes = (parameter.device_mesh for parameter in base.parameters() if isinstance(parameter, DTensor))
    in_two_steps = any(mesh.ndim > 1 or is_sequence_classifier(base) or dora for mesh in meshes)
    return read_adapter(base, path, name, _attach_then_load if in_two_steps else None)


def _attach_then_load(base: "PreTrainedModel", folder: str, name: str) -> "PeftModel":
    """Do what PeftModel.from_pretrained does, in two steps.

    PEFT mistakes the size of weights on a mesh of two dimensions (`WholeShapePlaceholders`), and could not read a whole head
    into the shards that it copied.
    """
    from peft import PeftConfig, PeftModel, get_peft_model

    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = True
    placeholders = WholeShapePlaceholders(base)
    try:
        model = get_peft_model(base, config, adapter_name=name)
    finally:
        placeholders.restore()
    unshard_copied_modules(model)
    assert isinstance(model, PeftModel)
    model.load_adapter(folder, name)
    return model


def copy_weights(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Copy the weights of a model into another that is divided in the same way; collective."""
    ours, theirs = owners_of(source), owners_of(target)
    with torch.no_grad():
        for name in sorted(set(first_names(target).values()) & theirs.keys()):
            wanted, tensor = ours[name], theirs[name]
            if isinstance(wanted, DTensor) and not isinstance(tensor, DTensor):
                continue  # a quantized base, whose copy is not divided, and which nothing rounds
            # An adapter's weights are partitioned with the engine, and those of the copy are not.
            partitioned = is_partitioned(wanted) or is_partitioned(tensor)
            if isinstance(wanted, torch.nn.Parameter) and isinstance(tensor, torch.nn.Parameter) and partitioned:
                copy_partitioned(wanted, tensor)
            else:
                local(tensor).copy_(local(wanted))


def fill_weights(target: torch.nn.Module, tensors: WholeTensors, strategy: "Strategy") -> None:
    """Copy whole tensors, which rank 0 has, into a model that may be divided; collective."""
    theirs = owners_of(target)
    with exhausted(tensors):
        for name, tensor in tensors:
            into = theirs[name]
            if not into.is_floating_point():  # never rounded
                continue
            if isinstance(into, torch.nn.Parameter) and is_partitioned(into):
                fill_partitioned(into, tensor)
                continue
            shared = torch.empty(into.shape, dtype=into.dtype, device=strategy.device)
            if tensor is not None:
                shared.copy_(tensor)
            if strategy.world_size > 1:
                torch.distributed.broadcast(shared, src=0, group=strategy.ranks.group)
            if isinstance(into, DTensor):
                shared = distribute_tensor(shared, into.device_mesh, into.placements, src_data_rank=None)
            into.copy_(shared)
