"""Names, row order and metadata of a transformers model in a GGUF file.

The keys are defined in ggml's docs/gguf.md; the rows of Llama's queries and keys are in the order of Meta's own weights, in
which the two halves of a rotated pair are neighbours.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forge_dist._errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
"""transformers' model_type → GGUF's general.architecture."""

ROPE_FACTORS = "rope_freqs.weight"
"""GGUF's name of the rotary scaling factors."""

_FREQUENCIES = ".rotary_emb.inv_freq"
"""End of transformers' name of the rotary frequencies."""


def gguf_architecture(model: "PreTrainedModel", where: Path) -> str:
    """Return GGUF's name of the model's architecture.

    Raises:
        ModelError: it has none that is supported here, or the model has a feature that readers of that architecture do not
            know.
    """
    config: Any = model.config
    arch = ARCHITECTURES.get(config.model_type)
    if arch is None or not type(model).__name__.endswith("ForCausalLM"):
        raise ModelError(
            f"{where}: a {type(model).__name__} (model_type {config.model_type}) cannot be written as GGUF here; known are "
            f"causal language models of the types {', '.join(ARCHITECTURES)}; use format=hf"
        )
    rope = config.rope_parameters or {}
    kind = rope.get("rope_type", "default")
    for what, held, known in (
        ("hidden_act", config.hidden_act, config.hidden_act in ("silu", "swish")),
        ("rope_type", kind, kind == "default" or (kind == "llama3" and arch == "llama")),
        ("attention_bias", True, not getattr(config, "attention_bias", False)),
        ("mlp_bias", True, not getattr(config, "mlp_bias", False)),
        # llama.cpp reads no head_dim for qwen2, and takes the quotient.
        ("head_dim", head_dim(config), arch != "qwen2" or head_dim(config) * config.num_attention_heads == config.hidden_size),
        ("partial_rotary_factor", rope.get("partial_rotary_factor"), rope.get("partial_rotary_factor", 1.0) == 1.0),
    ):
        if not known:
            raise ModelError(
                f"{where}: {what}={held!r} of this {config.model_type} model is nothing that readers of GGUF's {arch!r} "
                "would find or that could be proved here; use format=hf"
            )
    return arch


def head_dim(config: Any) -> int:
    """Return the width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def model_fields(config: Any, arch: str) -> dict[str, Any]:
    """Return GGUF's keys and values that describe the model: integers, floats, text.

    The context is no longer than a sliding window: within it every token attends to all before it, which is what readers
    compute.
    """
    window = getattr(config, "sliding_window", None)
    if arch != "llama" and "sliding_attention" not in (config.layer_types or ()):
        window = None  # Qwen's configurations keep a window that no layer uses
    width = head_dim(config)
    fields: dict[str, Any] = {
        "context_length": min(config.max_position_embeddings, window or config.max_position_embeddings),
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": width,
        "attention.value_length": width,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": float((config.rope_parameters or {}).get("rope_theta", 10000.0)),
        "vocab_size": config.vocab_size,
    }
    if arch == "llama":
        fields["rope.dimension_count"] = width
    return {"general.architecture": arch, "general.type": "model", **{f"{arch}.{key}": value for key, value in fields.items()}}


def gguf_names(model: "PreTrainedModel", arch: str, where: Path) -> dict[str, torch.Tensor]:
    """Return GGUF's name → the model's own tensor; without a head that is tied to the embedding.

    Raises:
        ModelError: a tensor has no name in GGUF.
    """
    state = model.state_dict()
    return {known: state[name] for name, known in names_in_file(model, arch, where).items()}


def names_in_file(model: "PreTrainedModel", arch: str, where: Path) -> dict[str, str]:
    """Return the model's name of each tensor → GGUF's; arguments and errors as of `gguf_names`."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch)
    table = get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = {}
    for name in model.state_dict():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        known = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ModelError(f"{where}: the tensor {name} has no name in GGUF's {arch!r}; use format=hf")
        found[name] = known
    return found


def file_row_order(name: str, tensor: torch.Tensor, config: Any, arch: str) -> torch.Tensor:
    """Permute the rows of a model's tensor to the file's order."""
    heads = _rotated_heads(name, config, arch)
    if not heads:
        return tensor
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def model_row_order(name: str, tensor: torch.Tensor, config: Any, arch: str) -> torch.Tensor:
    """Permute the rows of a file's tensor to the model's order."""
    heads = _rotated_heads(name, config, arch)
    if not heads:
        return tensor
    return tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _rotated_heads(name: str, config: Any, arch: str) -> int:
    """Return the heads of a tensor whose rows the file orders differently; 0 for the others."""
    if arch != "llama":
        return 0
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in name else 0


def rope_factors(model: "PreTrainedModel") -> torch.Tensor | None:
    """Return the factors by which readers divide plain rotary frequencies to get the model's.

    float32[head_dim / 2]; None where the model's are plain.
    """
    plain = plain_frequencies(model.config)
    own = own_frequencies(model).cpu()
    return None if torch.equal(own, plain) else plain / own


def plain_frequencies(config: Any) -> torch.Tensor:
    """Compute the rotary frequencies without scaling (arXiv 2104.09864).

    float32[head_dim / 2], in radians a position.
    """
    width = head_dim(config)
    base = (config.rope_parameters or {}).get("rope_theta", 10000.0)
    return 1.0 / (base ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))


def own_frequencies(model: "PreTrainedModel") -> torch.Tensor:
    """Return the model's own rotary frequencies, its buffer float32[head_dim / 2]."""
    buffers: Mapping[str, torch.Tensor] = dict(model.named_buffers())
    return next(buffer for name, buffer in buffers.items() if name.endswith(_FREQUENCIES))
