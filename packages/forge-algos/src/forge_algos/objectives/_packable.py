"""A model that is about to be trained on packed rows → shown to keep their documents apart, or refused."""

import torch
from torch import nn

from forge_algos._errors import AdapterError
from forge_algos._isolation import require_isolation
from forge_algos._modules import unwrap


def require_packable(model: nn.Module, *, device: torch.device) -> None:
    """Raise unless documents in one row are to this model what they are alone.

    Raises:
        PackedBatchError: it does not keep them apart; two made-up ones are tried.
        AdapterError: it carries a prompt-like adapter, whose virtual tokens belong to no document.
    """
    for name, config in getattr(unwrap(model), "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            kind = getattr(config, "peft_type", "a prompt")
            raise AdapterError(f"adapter {name!r} is {kind}: its virtual tokens have no place in a packed row; use LoRA")
    require_isolation(model, device=device)
