"""Tiny models of several modalities, saved as plain directories in bfloat16 with a tokenizer and processor files."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    AutoModelForMultimodalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma4Config,
    Llama4Config,
    Mistral3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3_5Config,
    Qwen3VLConfig,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

VOCABULARY = 512
IMAGE, VIDEO, START, END = 500, 501, 502, 503
"""Token ids of images, which the tokenizer of the tests does not have."""
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
VISION = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
_QWEN_VISION = {"depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "patch_size": 14, "out_hidden_size": 32}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_WINDOW = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}

CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma3": lambda: Gemma3Config(
        text_config={**TEXT, **_WINDOW, "query_pre_attn_scalar": 8},
        vision_config={**VISION, "num_hidden_layers": 1},
        mm_tokens_per_image=4,
        image_token_id=IMAGE,
        boi_token_index=START,
        eoi_token_index=END,
    ),
    "gemma4": lambda: Gemma4Config(
        text_config={
            **TEXT,
            **_WINDOW,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "global_head_dim": 8,
            "num_kv_shared_layers": 0,
        },
        vision_config={
            **VISION,
            "num_hidden_layers": 1,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "position_embedding_size": 16,
        },
        image_token_id=IMAGE,
        audio_token_id=VIDEO,
        boi_token_id=START,
    ),
    "qwen3-vl": lambda: Qwen3VLConfig(
        text_config={
            **TEXT,
            "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "mrope_interleaved": True},
        },
        vision_config={**_QWEN_VISION, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
        **_QWEN_IDS,
    ),
    "qwen3.5": lambda: Qwen3_5Config(
        text_config={
            **TEXT,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "rope_parameters": {
                "rope_type": "default",
                "mrope_section": [1, 1, 0],
                "mrope_interleaved": True,
                "partial_rotary_factor": 0.5,
            },
        },
        vision_config={**_QWEN_VISION, "num_position_embeddings": 16},
        **_QWEN_IDS,
    ),
    "llama4": lambda: Llama4Config(
        text_config={
            **TEXT,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 8,
        },
        vision_config={
            **VISION,
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "vision_output_dim": 16,
            "projector_input_dim": 16,
            "projector_output_dim": 16,
        },
        image_token_index=IMAGE,
    ),
    "mistral3": lambda: Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None},
        vision_config={**VISION, "model_type": "pixtral", "num_hidden_layers": 1, "head_dim": 8},
        image_token_index=IMAGE,
    ),
}
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


def save(name: str, directory: Path, tokenizer: Path) -> Path:
    """The tiny model `name` with fixed random weights in bfloat16, the tokenizer of another directory, processor files."""
    torch.manual_seed(20)
    model = AutoModelForMultimodalLM.from_config(CONFIGS[name](), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
            parameter.data = parameter.to(torch.bfloat16)
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(directory)
    for file in PROCESSOR_FILES:
        (directory / file).write_text(json.dumps({"of": file}))
    return directory


def plain(directory: Path) -> PreTrainedModel:
    """The saved model as transformers itself loads it, its language part trainable and all else frozen."""
    model: Any = AutoModelForMultimodalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    model.requires_grad_(False)
    for part in (model.get_decoder(), model.get_output_embeddings()):
        part.requires_grad_(True)
    return model
