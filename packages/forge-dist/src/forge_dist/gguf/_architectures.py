"""Architectures of GGUF files: what their fields say, and what readers take for granted.

Keys, names and order of tensors are those that llama.cpp's converter writes (its folder conversion/) and that its loader reads
(src/models/).
"""

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch

View = Callable[[torch.Tensor], torch.Tensor]
"""Model's tensor → the part of it that one tensor of a file holds: a view, by which the part is read and written."""


@attrs.frozen(kw_only=True)
class Architecture:
    """Row of `ARCHITECTURES`: how a model of one type is written."""

    name: str
    """GGUF's general.architecture."""

    integers: Mapping[str, str] = attrs.field(factory=dict)
    """GGUF's key → the configuration's setting, beside those of `INTEGERS`."""

    floats: Mapping[str, str] = attrs.field(factory=dict)
    """The same, beside those of `FLOATS`."""

    assumed: Mapping[str, Any]
    """Setting → the value with which readers compute without being told; a function is given the configuration."""

    rotary: tuple[str, ...] = ("default",)
    """Kinds of rotary embeddings that readers have."""

    part_of_head: bool = False
    """Whether the rotary embeddings may rotate the first part of a head alone."""

    constants: Mapping[str, int] = attrs.field(factory=dict)
    """GGUF's key → the value that every model has."""

    neighbours: bool = False
    """Whether the two numbers of a rotated pair are neighbours in the file; in the model they are half a head apart."""

    norms_from_zero: bool = False
    """Whether a weight of 0 in the model's norms is 1 in the file's."""

    parts: Mapping[str, Mapping[str, View]] = attrs.field(factory=dict)
    """Name in a layer of the model → the names in the file, for tensors that are divided or that gguf has no name for."""

    by_transformers: bool = False
    """Whether transformers reads such files rightly: it is who proves them then."""


INTEGERS = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
"""GGUF's key → the configuration's setting, in every architecture."""

FLOATS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
"""The same for numbers that are no integers."""


def head_dim(config: Any) -> int:
    """Return the width of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _quotient(config: Any) -> float:
    return config.hidden_size / config.num_attention_heads


def _three_of_four(config: Any) -> list[int]:
    return [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)]


def _windows(every: int) -> Callable[[Any], list[str]]:
    """Return layer_types in which each `every`th is full attention, and the others windows."""
    return lambda config: [
        "sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(config.num_hidden_layers)
    ]


def _gemma_scale(largest: int) -> Callable[[Any], float]:
    """Return query_pre_attn_scalar: a head's width, but in the model with `largest` layers."""
    return lambda config: _quotient(config) if config.num_hidden_layers == largest else head_dim(config)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself: a part that is all of it."""
    return tensor


def _first_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, : tensor.shape[1] // 2]


def _second_half(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, tensor.shape[1] // 2 :]


def _even(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., ::2]


def _odd(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[..., 1::2]


def _transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2)


def _even_columns(tensor: torch.Tensor) -> torch.Tensor:
    return _transposed(_even(tensor))


def _odd_columns(tensor: torch.Tensor) -> torch.Tensor:
    return _transposed(_odd(tensor))


def _row(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[0]


_PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}
_GEMMA = {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_EXPERTS_EVERYWHERE = {"decoder_sparse_step": 1, "mlp_only_layers": []}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_EXPERT_PARTS: dict[str, dict[str, View]] = {
    "mlp.experts.gate_up_proj": {"ffn_gate_exps.weight": _first_half, "ffn_up_exps.weight": _second_half},
    "mlp.experts.down_proj": {"ffn_down_exps.weight": whole},
}
_LLAMA = Architecture(name="llama", assumed=_PLAIN, rotary=("default", "llama3"), neighbours=True, by_transformers=True)

ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    # llama.cpp reads no width of a head where it is the quotient in every released model.
    "qwen2": Architecture(name="qwen2", assumed=_PLAIN | {"head_dim": _quotient}, by_transformers=True),
    "qwen3": Architecture(name="qwen3", assumed=_PLAIN, by_transformers=True),
    "qwen2_moe": Architecture(
        name="qwen2moe",
        integers=_EXPERTS | {"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        assumed=_PLAIN
        | _EXPERTS_EVERYWHERE
        | {"head_dim": _quotient, "norm_topk_prob": False, "qkv_bias": True, "tie_word_embeddings": False},
        parts=_EXPERT_PARTS | {"mlp.shared_expert_gate.weight": {"ffn_gate_inp_shexp.weight": _row}},
    ),
    "granite": Architecture(
        name="granite",
        floats={
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        assumed=_PLAIN,
        neighbours=True,
    ),
    "olmo2": Architecture(name="olmo2", assumed=_PLAIN | {"head_dim": _quotient, "tie_word_embeddings": False}),
    "phi3": Architecture(
        name="phi3",
        assumed=_PLAIN | {"head_dim": _quotient},
        rotary=("default", "longrope"),
        part_of_head=True,
        # Old releases of llama.cpp guess a window where the key is missing; none has a window by it.
        constants={"attention.sliding_window": 0},
    ),
    "gpt_oss": Architecture(
        name="gpt-oss",
        integers=_WINDOW
        | {
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
        },
        assumed={
            "hidden_act": "silu",
            "attention_bias": True,
            "layer_types": _windows(2),
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
        rotary=("default", "yarn"),
        parts={
            "self_attn.sinks": {"attn_sinks.weight": whole},
            "mlp.experts.gate_up_proj": {"ffn_gate_exps.weight": _even_columns, "ffn_up_exps.weight": _odd_columns},
            "mlp.experts.gate_up_proj_bias": {"ffn_gate_exps.bias": _even, "ffn_up_exps.bias": _odd},
            "mlp.experts.down_proj": {"ffn_down_exps.weight": _transposed},
            "mlp.experts.down_proj_bias": {"ffn_down_exps.bias": whole},
        },
    ),
    "gemma2": Architecture(
        name="gemma2",
        integers=_WINDOW,
        floats={"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"},
        assumed=_GEMMA | {"layer_types": _windows(2), "query_pre_attn_scalar": _gemma_scale(46), "tie_word_embeddings": True},
        norms_from_zero=True,
    ),
    "gemma3_text": Architecture(
        name="gemma3",
        integers=_WINDOW,
        assumed=_GEMMA
        | {
            "layer_types": _windows(6),
            "query_pre_attn_scalar": _gemma_scale(62),
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "use_bidirectional_attention": False,
        },
        rotary=("default", "linear"),
        norms_from_zero=True,
    ),
    "smollm3": Architecture(
        name="smollm3",
        assumed=_PLAIN | {"no_rope_layers": _three_of_four},
        neighbours=True,
    ),
    "qwen3_moe": Architecture(
        name="qwen3moe",
        integers=_EXPERTS,
        assumed=_PLAIN | _EXPERTS_EVERYWHERE | {"norm_topk_prob": True},
        parts=_EXPERT_PARTS,
    ),
}
"""transformers' model_type → how it is written."""
