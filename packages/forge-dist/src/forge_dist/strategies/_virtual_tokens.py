"""Virtual tokens and adaption prompts (PEFT) on a divided model: made callable where PEFT goes past the hooks that gather weights.

PEFT looks tokens up before the model's own forward: the embedding's weight is the root's, which gathers it at the beginning of that
forward, or that of a unit of its own, which FSDP calls only once it knows the root. And adaption prompts go to the model's `forward`
without its hooks.
"""

from typing import Any

import torch
from torch import nn

from forge_dist.adapters._adapter import base_of, is_peft
from forge_dist.strategies._wrappers import fsdp_modules, resharded

ENCODER = "prompt_encoder"
"""PEFT's name of the module that makes virtual tokens."""


def gather_before_lookup(model: nn.Module) -> None:
    """From now on a forward of `model`, if it is a PeftModel with virtual tokens on divided weights, finds what it needs; collective."""
    root = next(fsdp_modules(model), None)
    if root is None or not is_peft(model):
        return
    base: Any = base_of(model)
    if model.active_peft_config.is_adaption_prompt:
        setattr(model.base_model, "forward", base.__call__)  # noqa: B010  the checker takes it for a method
    if not model.active_peft_config.is_prompt_learning:
        return
    training = base.training
    with torch.no_grad():
        # One token, so that the root is known as such; the divided parts remember it.
        base.eval()(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    base.train(training)
    resharded(model)
    model.register_forward_pre_hook(lambda _module, _args: root.unshard())


def thrown_away(model: nn.Module) -> tuple[str, ...]:
    """Modules of a PeftModel that no directory holds: a prefix that a small network makes is written as what that network made."""
    encoders: Any = getattr(model, ENCODER, {}) if is_peft(model) else {}
    return (ENCODER,) if any(hasattr(encoder, "transform") for encoder in encoders.values()) else ()
