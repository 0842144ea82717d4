"""Model directories with random weights, made by the name of a shape, so that a benchmark needs no download.

A step costs the same whatever the weights are; a loss after training on random weights means nothing and none is reported.
"""

from pathlib import Path
from typing import Any, NamedTuple

# Shapes as the models' own config.json files give them; `toy-*` are for tests alone.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {
        "model_type": "llama", "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "small": {
        "model_type": "llama", "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000, "tie_word_embeddings": True,
    },
    "smollm2-135m": {
        "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "head_dim": 64, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True,
    },
    "qwen3-0.6b": {
        "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "mamba2-small": {
        "model_type": "mamba2", "hidden_size": 256, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 64, "n_groups": 1,
        "state_size": 64, "vocab_size": 8192, "tie_word_embeddings": True,
    },
    "gpt-oss-small": {
        "model_type": "gpt_oss", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 8192,
    },
    "toy-mamba2": {
        "model_type": "mamba2", "hidden_size": 32, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 8, "n_groups": 1,
        "state_size": 8, "vocab_size": 1024, "tie_word_embeddings": True,
    },
    "toy-llama": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 1024, "tie_word_embeddings": True,
    },
    "toy-qwen3": {
        "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 1024, "tie_word_embeddings": True,
    },
}  # fmt: skip


class Described(NamedTuple):
    """Sizes of a model; `linear_weights` are those of the decoder layers' matrices, without embedding and head."""

    name: str
    vocabulary: int
    width: int
    layers: int
    heads: int
    head_dim: int
    linear_weights: int
    tied: bool


def write_model(shape: str, directory: Path) -> Path:
    """Make a model of this shape with seeded random weights and save it as a plain Hugging Face directory, in fp32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, max_position_embeddings=32768)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return directory


def model_directory(name: str, directory: Path) -> Path:
    """Return the directory of a model: `name` itself, or `directory`, where a model of the shape of that name is written."""
    return write_model(name, directory) if name in SHAPES else Path(name)


def describe(directory: Path, name: str) -> Described:
    """Read a model's sizes from the directory's config; no weights are loaded."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = sum(m.weight.numel() for m in model.base_model.modules() if isinstance(m, torch.nn.Linear))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return Described(
        name,
        config.vocab_size,
        config.hidden_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        head_dim,
        linear,
        bool(config.tie_word_embeddings),
    )
