"""Find the model inside its wrappers: DDP, DeepSpeed's engine, PEFT."""

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


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Check whether ZeRO-3 partitions the parameter over the ranks, as DeepSpeed notes on it."""
    return hasattr(parameter, "ds_id")
