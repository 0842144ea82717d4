"""Weights and biases of the base in a stored adapter: compared with the model's, or trained."""

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from forge_algos._errors import AdapterError
from forge_algos._modules import trained_biases
from forge_algos.adaptations.peft._directory import CONFIG, WEIGHTS, StoredAdapter
from forge_algos.adaptations.peft._lora_init import whole_weight

if TYPE_CHECKING:
    from peft import PeftModel

PREFIX = "base_model.model."
"""What names in an adapter's file begin with, before the base's own."""


def check_biases(model: "PeftModel", stored: StoredAdapter) -> None:
    """Raise AdapterError where trained biases of the base are divided, quantized or rounded."""
    config: Any = model.peft_config["default"]
    setting, biases = getattr(config, "bias", "none"), trained_biases(model)
    if setting != "none" and not biases:
        config.bias = "none"  # the base has none, and PEFT would warn of them where the adapter is switched off
    for name, bias in biases.items():
        holder: Any = model.get_submodule(name.rpartition(".")[0])
        weight = getattr(holder, "weight", bias)
        where = f"adapter_path {stored.folder}: bias={setting!r} in its {CONFIG} trains biases of the base"
        if isinstance(bias, DTensor) or hasattr(bias, "ds_id") or not bias.numel() or (0 in bias.stride() and not bias.is_meta):
            raise AdapterError(f"{where}, which the strategy divides over ranks: use one process, or strategy=ddp")
        if not weight.is_floating_point() or hasattr(weight, "quant_state"):
            raise AdapterError(f"{where}, whose layers are held in codes here: use adapter=lora")
        if bias.dtype != torch.float32:
            kind = str(bias.dtype).removeprefix("torch.")
            raise AdapterError(f"{where}, which are held in {kind} here, where small steps are lost: set dtype=float32")


def is_of_base(name: str) -> bool:
    """Return whether a tensor in a file is a weight of the base.

    PEFT writes that of an embedding or head which it adapts.
    """
    return name.endswith(".base_layer.weight")


def compare_with_base(model: "PeftModel", stored: StoredAdapter, name: str) -> None:
    """Raise AdapterError where a weight of the base in the file is not the model's.
    Collective on a divided model.
    """
    from safetensors import safe_open

    layer = name.removeprefix(PREFIX).removesuffix(".base_layer.weight")
    base: Any = model.get_base_model().get_submodule(layer).base_layer
    if base.weight.is_meta:
        return
    if not base.weight.numel() or hasattr(base.weight, "ds_id") or 0 in base.weight.stride():
        raise AdapterError(
            f"adapter_path {stored.folder}: it holds the weight of {layer} too, and strategy=hsdp and zero3 have the model's "
            "nowhere whole to compare: use strategy=fsdp2, ddp or zero2"
        )
    with safe_open(str(stored.folder / WEIGHTS), "pt") as file:
        theirs = file.get_tensor(name)
    ours = whole_weight(base).cpu()
    # Whichever of both was rounded when it was loaded.
    least = min(theirs.dtype, base.weight.dtype, key=lambda dtype: dtype.itemsize)
    same = base.weight.is_floating_point() and theirs.shape == ours.shape
    if not same or not torch.equal(theirs.to(least), ours.to(least)):
        raise AdapterError(
            f"adapter_path {stored.folder}: it trains {layer} by low-rank factors and holds that layer's own weight too, which "
            "is another one than in model_path: merge it (forge export --merge or PEFT's merge_and_unload) and begin another "
            "adapter"
        )
