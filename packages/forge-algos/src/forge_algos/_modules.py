"""A causal language model, bare or wrapped (by PEFT, by what divides it over ranks) → its parts: causal model, decoder, head.

Parts are looked at and never called: a forward goes through the outermost module, whose hooks gather weights and sum gradients.
The head is looked up anew at each use, so that a replaced module or weight is seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def unwrap(model: nn.Module) -> nn.Module:
    """What DistributedDataParallel, DeepSpeed's engine and their like hold as `module`; the model itself where nothing wraps it."""
    while isinstance(inner := getattr(model, "module", None), nn.Module):
        model = inner
    return model


def causal_model(model: nn.Module) -> nn.Module:
    """The transformers model inside wrappers and a PeftModel (whose LoRA layers sit in that very model), or the model itself."""
    model = unwrap(model)
    inner = _ask(model, "get_base_model") if hasattr(model, "peft_config") else None
    return model if inner is None else inner


def decoder(model: nn.Module) -> nn.Module | None:
    """The module that gives hidden states, or None where the model has no such part."""
    causal = causal_model(model)
    found = _ask(causal, "get_decoder")
    return None if found is causal else found


def head(model: nn.Module) -> nn.Module | None:
    """The module that turns hidden states into logits, or None where the model names none."""
    return _ask(causal_model(model), "get_output_embeddings")


def embeddings(model: nn.Module) -> nn.Module | None:
    """The module that turns token ids into vectors, or None where the model names none."""
    return _ask(causal_model(model), "get_input_embeddings")


def attention_of(causal: nn.Module) -> str | None:
    """The name of the model's attention implementation, as transformers keeps it; None for any other model."""
    return getattr(getattr(causal, "config", None), "_attn_implementation", None)


def vocabulary(model: nn.Module) -> int | None:
    """V: how many token ids the model embeds, or None where it does not say."""
    count = getattr(embeddings(model), "num_embeddings", None)
    return count if isinstance(count, int) else None


def virtual_tokens(model: nn.Module) -> int:
    """How many virtual tokens a prompt-like adapter of PEFT (prefix, prompt) puts before each document; 0 where there is none.

    Switching the adapter off does not change the answer.
    """
    config: Any = getattr(unwrap(model), "active_peft_config", None)
    return int(config.num_virtual_tokens) if getattr(config, "is_prompt_learning", False) else 0


def _ask(model: nn.Module, method: str) -> nn.Module | None:
    """The module that a method without arguments returns, or None where there is no such method or module."""
    find = getattr(model, method, None)
    found: object = find() if callable(find) else None
    return found if isinstance(found, nn.Module) else None


@contextmanager
def mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Training or evaluation mode inside the block; afterwards each module is as it was, those set by hand too."""
    before = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, was in before.items():
            module.training = was


def trainable(model: nn.Module) -> list[torch.nn.Parameter]:
    """The parameters that gradients reach."""
    return [p for p in model.parameters() if p.requires_grad]


def channel_factors(model: nn.Module) -> set[int]:
    """Ids of ia3's parameters: vectors around 1 in the shape of matrices, which PEFT calls `ia3_l`."""
    return {id(p) for name, p in model.named_parameters() if "ia3_l" in name.split(".")}
