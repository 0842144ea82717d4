"""Tiny models of several architectures, saved as plain HF directories, and a few ragged samples.

The models have grouped-query attention, two layers and weights large enough that attention matters: with the usual 0.02 a leak
between two documents, or a position that is off by one, would hardly change the logits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    Mamba2Config,
    MistralConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5TextConfig,
    Qwen3Config,
)

from .reference import NO_LOSS, Sample

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY = 131
WINDOW = 4

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, PretrainedConfig] = {
    "llama-tied": LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "llama-untied": LlamaConfig(**_SHAPE, tie_word_embeddings=False),
    "qwen3": Qwen3Config(**_SHAPE, tie_word_embeddings=True),
    # Sliding windows shorter than the documents below: every layer of Mistral's, one of the two of Gemma3's.
    "mistral-window": MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "gemma3-window": Gemma3TextConfig(
        **_SHAPE, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=8
    ),
}

# Models that do not keep packed documents apart by position_ids alone, each for a reason of its own.
_OLD_SHAPE = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OTHER_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma2: capped scores": lambda: Gemma2Config(**_SHAPE, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "gpt-oss: sinks, and a mask made without positions": lambda: GptOssConfig(
        **_SHAPE, num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW, rope_parameters={"rope_type": "default"}
    ),
    "llama4: chunked attention": lambda: Llama4TextConfig(
        **_SHAPE, num_local_experts=2, intermediate_size_mlp=32, attention_chunk_size=8
    ),
    "opt: positions from the mask": lambda: OPTConfig(
        **_OLD_SHAPE, ffn_dim=48, max_position_embeddings=256, word_embed_proj_dim=32, init_std=0.1
    ),
    "bloom: distances over the whole row": lambda: BloomConfig(
        vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, initializer_range=0.1
    ),
    "lfm2: a convolution": lambda: Lfm2Config(**_SHAPE, layer_types=["conv", "full_attention"]),
    "mamba2: a state": lambda: Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=8,
        n_groups=1,
        state_size=16,
        chunk_size=16,
    ),
    "qwen3.5: a state, and an error of transformers": lambda: Qwen3_5TextConfig(
        **_SHAPE,
        linear_num_value_heads=2,
        linear_num_key_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        layer_types=["linear_attention", "full_attention"],
    ),
}


def save(name: str, directory: Path) -> str:
    """The tiny model `name` with its one fixed set of random fp32 weights, as a plain HF directory; the directory's name."""
    torch.manual_seed(20)
    config = CONFIGS[name] if name in CONFIGS else OTHER_CONFIGS[name]()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    # Norm weights all start at one value; shaken, a gradient that mixes two of them up shows.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(directory)
    return str(directory)


def plain(directory: str) -> PreTrainedModel:
    """The saved model as transformers itself loads it, with eager attention: what the reference trains."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")


def sample(length: int, seed: int, labelled: slice | None = slice(0, None)) -> Sample:
    """`length` random tokens; the labels of the slice `labelled` are the tokens themselves, all others -100."""
    ids = np.random.default_rng([seed, length]).integers(3, VOCABULARY, length).tolist()
    labels = [NO_LOSS] * length
    if labelled is not None:
        labels[labelled] = ids[labelled]
    return Sample(ids, labels)


def ragged() -> list[Sample]:
    """Ten samples of odd lengths, each with another difficult loss mask."""
    return [
        sample(17, 0),  # the first label is a token, which nothing in its own sample predicts
        sample(1, 1),  # nothing to predict at all, though labelled
        sample(9, 2, slice(4, None)),  # a prompt and its answer
        sample(2, 3),  # one prediction
        sample(23, 4, None),  # no trained token
        sample(1, 5, None),
        sample(13, 6, slice(0, 5)),  # trained at the start only; the end must not be read
        sample(22, 7, slice(3, None, 3)),  # trained tokens scattered
        sample(5, 8, slice(4, 5)),  # the last token alone
        sample(8, 9),
    ]


def low_rank_pairs(peft_model: PreTrainedModel) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The (A, B) of a PEFT model's LoRA layers by the name of the layer in the base model, read from its parameters' names."""
    halves: dict[str, dict[str, torch.Tensor]] = {}
    for name, parameter in peft_model.named_parameters():
        layer, found, half = name.removeprefix("base_model.model.").partition(".lora_")
        if found:
            halves.setdefault(layer, {})[half] = parameter.detach()
    return {layer: (half["A.default.weight"], half["B.default.weight"]) for layer, half in halves.items()}
