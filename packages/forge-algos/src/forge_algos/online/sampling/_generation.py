"""Parts of a call of transformers' `generate`: logits processors, cache, settings."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from forge_algos._cache_argument import cache_argument
from forge_algos._modules import causal_model, free_gathered, language_modules
from forge_algos.isolation._rotary import reset_frequencies
from forge_algos.online.sampling._draw import RepetitionPenalty, Warp


def made_up_token(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Leave only the token before the row's last one possible, in the place of `DrawToken`."""
    # There may be fewer scores than embeddings.
    token = input_ids[:, -2:][:, :1] % scores.shape[1]
    return torch.full_like(scores, -torch.inf).scatter_(1, token, 0.0)


def cache_of(output: Any) -> Any:
    """Return the keys and values that `generate` gives beside the ids."""
    return getattr(output, cache_argument())


def of_keys_alone(cache: Any) -> bool:
    """Return whether each layer of a cache has keys and values that other rows can take over."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    return isinstance(cache, DynamicCache) and all(type(x) in (DynamicLayer, DynamicSlidingWindowLayer) for x in cache.layers)


def grow(cache: Any, tokens: int) -> bool:
    """Add keys and values of so many tokens to a cache; return whether it has any."""
    grown = False
    for number, layer in enumerate(getattr(cache, "layers", ())):
        keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
        if isinstance(keys, torch.Tensor) and isinstance(values, torch.Tensor):
            more = [each.new_empty(*each.shape[:2], tokens, each.shape[3]) for each in (keys, values)]
            cache.update(*more, number)
            grown = True
    return grown


def warps_of(
    temperature: float, top_p: float, top_k: int, min_p: float, *, never: Sequence[int] = (), device: torch.device
) -> list[Warp]:
    """Return logits processors in the order of `generate`; no token of `never` is possible."""
    from transformers import (
        MinPLogitsWarper,
        SuppressTokensLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    warps: list[Any] = [SuppressTokensLogitsProcessor([*never], device=str(device))] if never else []
    if temperature != 1.0:
        warps.append(TemperatureLogitsWarper(float(temperature)))
    if top_k:
        warps.append(TopKLogitsWarper(top_k))
    if top_p < 1.0:
        warps.append(TopPLogitsWarper(float(top_p)))
    if min_p:
        warps.append(MinPLogitsWarper(float(min_p)))
    return warps


def with_penalty(warps: Sequence[Warp], penalty: float, ids: torch.Tensor, mask: torch.Tensor) -> Sequence[Warp]:
    """Put the penalty of repeated tokens before the other processors, as `generate` does."""
    return warps if penalty == 1.0 else [RepetitionPenalty(penalty, ids, mask), *warps]


@contextmanager
def gathered_for_media(model: nn.Module) -> Iterator[None]:
    """Gather the weights of a divided model that compute on images.

    `generate` runs them before the model's forward, which gathers them itself.

    Args:
        model: wrapped, so that what an earlier forward left gathered can be divided again.
    """
    from torch.distributed.fsdp import FSDPModule

    free_gathered(model)
    causal: Any = causal_model(model)
    if isinstance(causal, FSDPModule):
        causal.unshard()
    language = language_modules(causal)
    own = [p for module in causal.modules() if module not in language for p in module.parameters(recurse=False)]
    with sys.modules["deepspeed"].zero.GatheredParameters(own) if any(hasattr(p, "ds_id") for p in own) else nullcontext():
        yield


@contextmanager
def first_frequencies(model: nn.Module) -> Iterator[None]:
    """Begin with rotary frequencies that no earlier forward let grow, and leave such behind."""
    reset_frequencies(model)
    try:
        yield
    finally:
        reset_frequencies(model)


@contextmanager
def default_generation_config(causal: Any) -> Iterator[None]:
    """Replace the model's own generation settings, which `generate` falls back to, in the block."""
    from transformers import GenerationConfig

    own = causal.generation_config
    causal.generation_config = GenerationConfig()
    try:
        yield
    finally:
        causal.generation_config = own
