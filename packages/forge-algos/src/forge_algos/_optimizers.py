"""A model and settings → AdamW over what trains."""

import torch
from torch import nn

from forge_algos._modules import trainable, unwrap
from forge_algos._settings import OptimizerSettings


def adamw(model: nn.Module, settings: OptimizerSettings, *, fused: bool = False) -> torch.optim.AdamW:
    """Torch's AdamW in two parameter groups: matrices (two dimensions or more) decay by `weight_decay`, the rest does not.

    With lr the scheduled rate: p ← p - lr · weight_decay · p, then p ← p - lr · m̂ / (√v̂ + eps), as torch.optim.AdamW.
    Parameters that need no gradient are left out. Embeddings are matrices and decay.

    Args:
        model: its parameters that need a gradient are trained.
        settings: where no learning rate is set, that of the model's adapter (`OptimizerSettings.resolve`).
        fused: one kernel a dtype instead of several passes over memory; say True where the device has it.
    """
    settings = settings.resolve("lora" if hasattr(unwrap(model), "peft_config") else "none")
    assert settings.learning_rate is not None
    parameters = trainable(model)
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=fused,
    )
