"""Weights and biases of the base in a stored adapter: compared with the model's, or trained."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from forge_algos._errors import AdapterError
from forge_algos._modules import embeddings, head, trained_biases
from forge_algos.adaptations.peft._directory import CONFIG, WEIGHTS, StoredAdapter
from forge_algos.adaptations.peft._lora_init import whole_weight

if TYPE_CHECKING:
    from peft import PeftModel

PREFIX = "base_model.model."
"""What names in an adapter's file begin with, before the base's own."""
_ADAPTED = ".base_layer.weight"
"""End of the name of a weight of the base beside which an adapter trains."""


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


def weights_of_base(model: "PeftModel", names: Iterable[str]) -> dict[str, str]:
    """Return names in a file that are a weight of the base, each with its layer.

    PEFT writes that of an embedding or head which it adapts, and those of both where `save_embedding_layers` says so, or where
    the vocabulary is not the one of the model's directory.
    """
    base = model.get_base_model()
    tops = [module for module in (embeddings(base), head(base)) if module is not None and "weight" in module._parameters]
    whole = {f"{PREFIX}{name}.weight": name for name, module in base.named_modules() if any(module is top for top in tops)}
    adapted = {name: name.removeprefix(PREFIX).removesuffix(_ADAPTED) for name in names if name.endswith(_ADAPTED)}
    return adapted | {name: whole[name] for name in names if name in whole}


def compare_with_base(model: "PeftModel", stored: StoredAdapter, name: str, layer: str, shape: Sequence[int]) -> None:
    """Raise AdapterError where a weight of the base in the file is not the model's.
    Collective on a divided model.

    Args:
        model: the model with the adapter.
        stored: the adapter.
        name: of the weight in the file.
        layer: of the base, whose weight it is.
        shape: of the weight in the file.
    """
    from safetensors import safe_open

    adapted: Any = model.get_base_model().get_submodule(layer)
    base: Any = adapted.base_layer if name.endswith(_ADAPTED) else adapted
    where = f"adapter_path {stored.folder}: it holds the weight of {layer} too"
    merge = "merge it (forge export --merge or PEFT's merge_and_unload) and begin another adapter"
    rows = getattr(base, "num_embeddings", None) or getattr(base, "out_features", shape[0])
    if shape[0] != rows:
        raise AdapterError(
            f"{where}, with {shape[0]} rows, and model_path has {rows}: the vocabulary was another one as it was trained. Give "
            f"that model as model_path; where none is kept, `model.resize_token_embeddings({shape[0]})`, and {merge}"
        )
    if base.weight.is_meta:
        return
    if not base.weight.numel() or hasattr(base.weight, "ds_id") or 0 in base.weight.stride():
        raise AdapterError(
            f"{where}, and strategy=hsdp and zero3 have the model's nowhere whole to compare: use strategy=fsdp2, ddp or zero2"
        )
    with safe_open(str(stored.folder / WEIGHTS), "pt") as file:
        theirs = file.get_tensor(name)
    ours = whole_weight(base).cpu()
    # Whichever of both was rounded when it was loaded.
    least = min(theirs.dtype, base.weight.dtype, key=lambda dtype: dtype.itemsize)
    same = base.weight.is_floating_point() and theirs.shape == ours.shape
    if not same or not torch.equal(theirs.to(least), ours.to(least)):
        raise AdapterError(f"{where}, which is another one than in model_path: {merge}")
