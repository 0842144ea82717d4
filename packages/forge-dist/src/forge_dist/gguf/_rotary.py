"""Rotary embeddings of a model as fields and tensors of a GGUF file, and back."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from forge_dist.gguf._architectures import Architecture, head_dim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROPE_FACTORS = "rope_freqs.weight"
"""GGUF's name of the factors by which readers divide plain frequencies."""

LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
"""Those of longrope (arXiv 2402.13753), in contexts beyond the original one and in others."""

YARN = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "attention_factor": None,
    "mscale": None,
    "mscale_all_dim": None,
}
"""Settings of YaRN (arXiv 2309.00071) that no field says: gpt-oss's.

llama.cpp has the two betas too, but rounds the bounds that follow from them (truncate).
"""

_FREQUENCIES = ".rotary_emb.inv_freq"
"""End of transformers' name of the rotary frequencies."""


def rotary_of(config: Any) -> dict[str, Any]:
    """Return the rotary parameters of a configuration's layers with full attention, with type."""
    rotary = config.rope_parameters or {}
    return {"rope_type": "default", "rope_theta": 10000.0, **rotary.get("full_attention", rotary)}


def unread_rotary(config: Any) -> dict[str, Any]:
    """Return the rotary settings whose values no field says and no reader assumes."""
    rotary = rotary_of(config)
    sliding = (config.rope_parameters or {}).get("sliding_attention", {})
    unread = {"sliding_attention": sliding} if sliding.get("rope_type", "default") != "default" else {}
    if rotary["rope_type"] == "yarn":
        given = YARN | {"truncate": True} | {name: rotary[name] for name in YARN if rotary.get(name) is not None}
        unread |= {name: value for name, value in given.items() if value != YARN[name]}
    return unread


def rotary_fields(config: Any, arch: Architecture) -> dict[str, Any]:
    """Return the fields of the rotary embeddings, by keys without the architecture's name."""
    rotary = rotary_of(config)
    fields: dict[str, Any] = {"rope.freq_base": float(rotary["rope_theta"])}
    if arch.neighbours or arch.part_of_head:  # by readers of the others it is the width of a head
        fields["rope.dimension_count"] = int(head_dim(config) * rotary.get("partial_rotary_factor", 1.0))
    if "sliding_attention" in (config.rope_parameters or {}):
        fields["rope.freq_base_swa"] = float(config.rope_parameters["sliding_attention"]["rope_theta"])
    if rotary["rope_type"] == "linear":
        fields |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(rotary["factor"])}
    if rotary["rope_type"] == "yarn":
        fields |= {
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": float(rotary["factor"]),
            "rope.scaling.original_context_length": int(rotary["original_max_position_embeddings"]),
        }
    if rotary["rope_type"] == "longrope":
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        fields |= {
            "rope.scaling.type": "longrope",
            "rope.scaling.original_context_length": int(rotary["original_max_position_embeddings"]),
            "rope.scaling.attn_factor": float(ROPE_INIT_FUNCTIONS["longrope"](config, torch.device("cpu"))[1]),
        }
    return fields


def rotary_parameters(fields: Mapping[str, Any], factors: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the rope_parameters that fields describe, by keys without the architecture's name.

    `factors` are those of longrope, by the names of their tensors.
    """
    width = fields["attention.key_length"]
    rotary = {"rope_type": fields.get("rope.scaling.type", "default"), "rope_theta": fields["rope.freq_base"]}
    if fields.get("rope.dimension_count", width) != width:
        rotary["partial_rotary_factor"] = fields["rope.dimension_count"] / width
    if rotary["rope_type"] == "longrope":
        rotary |= {
            "original_max_position_embeddings": fields["rope.scaling.original_context_length"],
            "attention_factor": fields["rope.scaling.attn_factor"],
            "long_factor": factors[LONG_FACTORS],
            "short_factor": factors[SHORT_FACTORS],
        }
    if rotary["rope_type"] == "yarn":
        rotary |= {
            "factor": fields["rope.scaling.factor"],
            "original_max_position_embeddings": fields["rope.scaling.original_context_length"],
        } | YARN
    if rotary["rope_type"] == "linear":
        rotary["factor"] = fields["rope.scaling.factor"]
    if "rope.freq_base_swa" in fields:
        sliding = {"rope_type": "default", "rope_theta": fields["rope.freq_base_swa"]}
        return {"full_attention": rotary, "sliding_attention": sliding}
    return rotary


def rotary_tensors(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """Return the tensors for a model's rotary embeddings: none where they are plain.

    float32, half as long as the part of a head that is rotated.
    """
    rotary = rotary_of(model.config)
    if rotary["rope_type"] == "llama3":
        return {ROPE_FACTORS: plain_frequencies(model.config) / own_frequencies(model).cpu()}
    if rotary["rope_type"] == "longrope":
        return {
            LONG_FACTORS: torch.tensor(rotary["long_factor"], dtype=torch.float32),
            SHORT_FACTORS: torch.tensor(rotary["short_factor"], dtype=torch.float32),
        }
    return {}


def plain_frequencies(config: Any) -> torch.Tensor:
    """Compute the rotary frequencies without scaling (arXiv 2104.09864).

    float32[head_dim / 2], in radians a position.
    """
    width = head_dim(config)
    return 1.0 / (rotary_of(config)["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))


def own_frequencies(model: "PreTrainedModel") -> torch.Tensor:
    """Return the model's own rotary frequencies, its buffer float32[head_dim / 2]."""
    buffers: Mapping[str, torch.Tensor] = dict(model.named_buffers())
    return next(buffer for name, buffer in buffers.items() if name.endswith(_FREQUENCIES))
