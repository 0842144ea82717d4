"""A value head on a causal language model: an estimate of the reward that is still to come."""

import torch
from torch import nn

from forge_algos._errors import AdapterError
from forge_algos._modules import causal_model, head, text_config

NAME = "value_head"
"""Name of the head on the causal model, and in its state."""


def attach_value_head(model: nn.Module) -> nn.Linear:
    """Register a trainable linear layer D → 1, zero at first, as the model's `value_head`.

    Float32 whatever the model's dtype. It is read inside the forward (`Head.logps(..., beside=...)`), so that it works where
    the model is divided over ranks; attach it before the model is wrapped and the optimizer made. A model's export leaves it
    out.

    Returns:
        nn.Linear: the head; one that is there already is returned as it is.

    Raises:
        AdapterError: neither a head nor a config states the width of the model's hidden states.
    """
    causal = causal_model(model)
    if isinstance(found := getattr(causal, NAME, None), nn.Linear):
        return found
    output = head(model)
    width = getattr(output, "in_features", None) or getattr(text_config(model), "hidden_size", None)
    if not isinstance(width, int):
        raise AdapterError(f"{type(causal).__name__} does not say how wide its hidden states are; a value head reads them")
    device = next(causal.parameters()).device
    linear = nn.Linear(width, 1, device=device, dtype=torch.float32)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    causal.add_module(NAME, linear)
    return linear


def require_value_head(model: nn.Module) -> nn.Linear:
    """Return the model's value head.

    Raises:
        AdapterError: it has none.
    """
    linear = getattr(causal_model(model), NAME, None)
    if not isinstance(linear, nn.Linear):
        raise AdapterError("the model has no value head: call attach_value_head(model) before it is wrapped and trained")
    return linear


def values_at(model: nn.Module, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Compute the value head's float32[M] at rows of hidden states float[T, D].
    It is called inside the model's forward.
    """
    linear = require_value_head(model)
    with torch.autocast(hidden.device.type, enabled=False):
        return linear(hidden.index_select(0, rows).to(linear.weight.dtype)).squeeze(-1)
