"""Model type of transformers → a config of the same structure, tiny.

Nothing is copied from a model card: a config class is asked for its own defaults, and every size that it knows by name is made
small. Lists with an entry for each layer keep one layer of each kind. What a class needs beside that stands in `OWN`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

VOCABULARY = 288
"""Enough for a byte-level tokenizer."""
WINDOW = 6
"""Tokens of sliding windows and chunks: shorter than the documents that are trained on."""

_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "audio_vocab_size", "decoder_vocab_size"), VOCABULARY),
    "unpadded_vocab_size": VOCABULARY - 8,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "context_length", "max_target_positions"), 256),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "lru_width", "embedding_size"), 32),
    **dict.fromkeys(("word_embed_proj_dim", "input_embedding_size", "output_embedding_size", "backbone_hidden_size"), 32),
    **dict.fromkeys(("intermediate_size", "decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "dff", "d_inner", "n_inner"), 48),
    **dict.fromkeys(("ffn_hidden_size", "feed_forward_size", "dim_ff", "intermediate_size_mlp", "dense_intermediate_size"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "moe_shared_expert_intermediate_size", "shared_experts_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "num_layers_per_stack"), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "attention_heads", "swa_num_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "linear_num_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "swa_head_dim", "kv_channels", "attention_head_size", "dim_head", "d_head"), 8),
    **dict.fromkeys(("global_head_dim", "linear_head_dim", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads"), 4),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank", "adapter_rank", "gated_norm_rank"), 8),
    **dict.fromkeys(("hidden_size_per_layer_input", "d_rel", "rel_extent", "router_hidden_size", "hc_lowrank"), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index"), 1),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "zero_expert_num"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "mamba_dt_rank", "time_step_rank"), 8),
    **dict.fromkeys(("mamba_n_heads", "num_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("mamba_n_groups", "n_groups", "mamba_ngroups", "n_mamba_heads", "o_groups"), 2),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_chunk_size", "attention_window_size"), WINDOW),
    **dict.fromkeys(("window_size", "local_attention", "keep_window_size"), WINDOW),
    **dict.fromkeys(("index_head_dim", "indexer_head_dim"), 8),
    # Few heads leave index scores of exactly 0, and which of equal keys is selected is nobody's promise.
    **dict.fromkeys(("index_n_heads", "indexer_n_heads"), 16),
    "index_topk": 6,
    "query_pre_attn_scalar": 8,
    "mamba_d_ssm": 64,
    "num_kv_shared_layers": 1,
    "max_window_layers": 1,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    "layerdrop": 0.0,
    "is_decoder": True,
    "add_cross_attention": False,
    "attention_type": "original_full",
    "initializer_range": 0.1,
    "init_std": 0.1,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "num_kv_shared_layers": 2,
    "num_global_key_value_heads": 2,
}
_GEMMA3N = {"num_hidden_layers": 4, "layer_types": _GEMMA4["layer_types"], "num_kv_shared_layers": 2}
_ALL_SHARED = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "num_kv_shared_layers": 4}
_BLT = {"num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 48, "num_hidden_layers": 1}
_QSA = {
    "indexer_n_heads": 16,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 8,
    "indexer_budget": 8,
    "indexer_compress_ratio": 2,
    "hc_count": 2,
}
_DOTS3 = {"index_topk": 6} | {
    f"swa_{name}": size
    for name, size in {
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "head_dim": 16,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    }.items()
}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "blt": {
        "encoder_hash_byte_group_size": [3, 4],
        "encoder_hash_byte_group_vocab": 31,
        "local_attention_window_len": WINDOW,
        "patcher_config": _BLT,
        "encoder_config": _BLT | {"hidden_size_global": 64},
        "decoder_config": _BLT | {"hidden_size_global": 64},
        "global_config": _BLT | {"hidden_size": 64},
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": {"n_routed_experts": 4, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note": {
        "text_config": _DOTS3,
        "vision_config": {
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
            "num_local_experts": 2,
            "mlp_layer_types": ["dense", "dense"],
        },
        "audio_config": {"adapter_out_dim": 32, "adapter_input_size": 32},
    },
    "dots3_note_text": _DOTS3,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_assistant": {"text_config": _GEMMA4 | _ALL_SHARED | {"model_type": "gemma4_text"}},
    "gemma4_text": _GEMMA4,
    "gemma4_unified": {"text_config": _GEMMA4},
    "gemma4_unified_assistant": {"text_config": _GEMMA4 | _ALL_SHARED | {"model_type": "gemma4_unified_text"}},
    "gemma4_unified_text": _GEMMA4,
    "gemma3n": {"text_config": _GEMMA3N},
    "gemma3n_text": _GEMMA3N,
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QSA},
    "qwen4_exp_text": _QSA,
    "reformer": {
        "attn_layers": ["local", "lsh"],
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 2,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 8,
        "pronunciation_vocab_size": VOCABULARY,
        "shape_embed_dim": 8,
        "shape_vocab_size": VOCABULARY,
    },
    "rwkv": {"num_hidden_layers": 4, "rescale_every": 2},
    "xlm": {"causal": True},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}
"""Model type → what else its config needs to be tiny."""


def tiny_config(model_type: str, own: Mapping[str, Any] | None = None) -> Any:
    """Make the tiny config of a model type; `own` replaces what `OWN` has of it.

    Raises:
        Exception: whatever its class raises for these sizes.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return _tiny(CONFIG_MAPPING[model_type], {**OWN.get(model_type, {}), **(own or {})})


def model_types() -> dict[str, str]:
    """Return every model type that transformers registers for causal language modelling, with its class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _tiny(kind: Any, own: dict[str, Any]) -> Any:
    """Make a config of a class: its defaults with small sizes, configs inside of it likewise."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = inspect.signature(kind.__init__).parameters
    default = _default(kind)
    given: dict[str, Any] = {}
    for name, parameter in names.items():
        inner, wanted = _of(default, name), own.get(name)
        if isinstance(wanted, dict) and "model_type" in wanted:
            given[name] = _tiny(CONFIG_MAPPING[wanted["model_type"]], {k: v for k, v in wanted.items() if k != "model_type"})
        elif hasattr(inner, "to_dict"):
            given[name] = _tiny(type(inner), wanted or {})
        elif name in _SIZES and (parameter.default is not None or name == "head_dim" or name.endswith("_token_id")):
            given[name] = _SIZES[name]
        elif isinstance(parameter.default, float) and ("drop" in name or name.endswith("_prob")):
            given[name] = 0.0
    given |= _by_layer(default, names)
    if "kv_lora_rank" in names and "num_key_value_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]
    return kind(**given | {name: value for name, value in own.items() if not hasattr(given.get(name), "to_dict")})


def _by_layer(default: Any, names: Any) -> dict[str, Any]:
    """Return lists with an entry for each layer, one layer of each kind, and the number of layers."""
    layers = next((n for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if n in names), None)
    if layers is None:
        return {}
    depth = _of(default, layers)
    lists = {
        name: value
        for name in names
        if name not in _SIZES and isinstance(value := _of(default, name), (list, tuple)) and len(value) == depth
    }
    if not lists:
        return {}
    rows = list(dict.fromkeys(zip(*lists.values(), strict=True)))
    while len(rows) < 2:
        rows.append(rows[-1])
    found = {name: [row[place] for row in rows] for place, name in enumerate(lists)}
    return {**found, layers: len(rows)}


def _of(config: Any, name: str) -> Any:
    """Return a value of a config, or None where it has none of that name for all layers alike."""
    try:
        return getattr(config, name, None)
    except Exception:  # noqa: BLE001 - transformers raises an error of its own
        return None


def _default(kind: Any) -> Any:
    """Return the config of a class's own defaults, or None where it refuses them."""
    try:
        return kind()
    except Exception:  # noqa: BLE001 - any
        return None
