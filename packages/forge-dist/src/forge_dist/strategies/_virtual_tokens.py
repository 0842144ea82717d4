"""PEFT's virtual tokens and adaption prompts on a sharded model.

PEFT embeds tokens before the model's own forward: the embedding's weight is in the root's group, which gathers it at the
beginning of that forward, or in a group of its own, which FSDP gathers only once it knows the root. And adaption prompts call
the model's `forward` without its hooks.
"""

from typing import Any

import torch
from torch import nn

from forge_dist.loading._unwrap import base_of, is_peft
from forge_dist.strategies._wrappers import fsdp_modules, resharded

ENCODER = "prompt_encoder"
"""PEFT's name of the module that computes virtual tokens."""


def gather_before_lookup(model: nn.Module) -> None:
    """Gather the embedding before each forward of a PeftModel with virtual tokens; collective.

    Other models, and those without sharded weights, are left as they are.
    """
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
        # A forward of one token, from which FSDP learns which module is the root.
        base.eval()(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=False)
    base.train(training)
    resharded(model)
    model.register_forward_pre_hook(lambda _module, _args: root.unshard())


def unsaved_modules(model: nn.Module) -> tuple[str, ...]:
    """Return the modules of a PeftModel that no adapter directory holds.

    A prefix that a small network computes is saved as that network's output.
    """
    encoders: Any = getattr(model, ENCODER, {}) if is_peft(model) else {}
    return (ENCODER,) if any(hasattr(encoder, "transform") for encoder in encoders.values()) else ()
