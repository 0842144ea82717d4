"""Rotary embeddings of a model as fields and tensors of a GGUF file, and back."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from forge_dist.gguf._architectures import Architecture, head_dim

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROPE_FACTORS = "rope_freqs.weight"
"""GGUF's name of the factors by which readers divide plain frequencies."""

_FREQUENCIES = ".rotary_emb.inv_freq"
"""End of transformers' name of the rotary frequencies."""


def rotary_of(config: Any) -> dict[str, Any]:
    """Return the rotary parameters of a configuration, with their type."""
    return {"rope_type": "default", "rope_theta": 10000.0, **(config.rope_parameters or {})}


def rotary_fields(config: Any, arch: Architecture) -> dict[str, Any]:
    """Return the fields of the rotary embeddings, by keys without the architecture's name."""
    fields: dict[str, Any] = {"rope.freq_base": float(rotary_of(config)["rope_theta"])}
    if arch.neighbours:  # by readers of the others it is the width of a head
        fields["rope.dimension_count"] = head_dim(config)
    return fields


def rotary_parameters(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rope_parameters that fields describe, by keys without the architecture's name."""
    return {"rope_type": "default", "rope_theta": fields["rope.freq_base"]}


def rotary_tensors(model: "PreTrainedModel") -> dict[str, torch.Tensor]:
    """Return the tensors for a model's rotary embeddings: none where they are plain.

    float32[head_dim / 2].
    """
    if rotary_of(model.config)["rope_type"] != "llama3":
        return {}
    return {ROPE_FACTORS: plain_frequencies(model.config) / own_frequencies(model).cpu()}


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
