"""Find the model inside its wrappers: DDP, DeepSpeed's engine, PEFT."""

import re
import sys
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel


def is_peft(model: object) -> "TypeGuard[PeftModel]":
    """Check for a PeftModel without importing peft (4 seconds), which a PeftModel has done."""
    peft = sys.modules.get("peft")
    return peft is not None and isinstance(model, peft.PeftModel)


def unwrapped(model: torch.nn.Module) -> "PreTrainedModel | PeftModel":
    """Return the model inside a strategy's wrappers.

    DDP and DeepSpeed's engine have it as `.module`.
    """
    while not is_peft(model) and isinstance(inner := getattr(model, "module", None), torch.nn.Module):
        model = inner
    return cast("PreTrainedModel", model)


def base_of(model: "PreTrainedModel | PeftModel") -> "PreTrainedModel":
    """Return the transformers model of a PeftModel, adapter layers inside it included."""
    return cast("PreTrainedModel", model.get_base_model() if is_peft(model) else model)


def merged_shapes(model: "PreTrainedModel | PeftModel") -> dict[str, torch.Size]:
    """Return the shapes of a model's state once its adapter is merged, by their names there.

    Modules that train whole beside the adapter, and rows of tokens, are in the place of what they replace.
    """
    shapes = {name: tensor.shape for name, tensor in base_of(model).state_dict().items()}
    if not is_peft(model):
        return shapes
    added = (".lora_", ".original_module.", ".trainable_tokens_")
    kept = {name: shape for name, shape in shapes.items() if not any(part in name for part in added)}
    return {_IN_ADAPTER.sub("", name): shape for name, shape in kept.items()}


_IN_ADAPTER = re.compile(r"\.(token_adapter|base_layer|modules_to_save\.[^.]+)(?=\.)")


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Check whether ZeRO-3 partitions the parameter over the ranks, as DeepSpeed notes on it."""
    return hasattr(parameter, "ds_id")
