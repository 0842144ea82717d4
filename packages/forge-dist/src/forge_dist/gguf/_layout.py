"""Names, order and metadata of a transformers model in a GGUF file, by `ARCHITECTURES`.

The keys are defined in ggml's docs/gguf.md; the rows of Llama's queries and keys are in the order of Meta's own weights, in
which the two halves of a rotated pair are neighbours.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from forge_dist._errors import ModelError
from forge_dist.gguf._architectures import ARCHITECTURES, FLOATS, INTEGERS, Architecture, View, head_dim, whole
from forge_dist.gguf._rotary import rotary_fields, rotary_of, unread_rotary

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_LAYER = re.compile(r"model\.layers\.(\d+)\.(.*)")


def gguf_architecture(model: "PreTrainedModel", where: Path) -> Architecture:
    """Return how the model is written.

    Raises:
        ModelError: its type is not supported here, or the model has a feature that readers of that architecture do not know.
    """
    config: Any = model.config
    arch = ARCHITECTURES.get(config.model_type)
    if arch is None or not type(model).__name__.endswith("ForCausalLM"):
        raise ModelError(
            f"{where}: a {type(model).__name__} (model_type {config.model_type}) cannot be written as GGUF here; known are "
            f"causal language models of the types {', '.join(ARCHITECTURES)}; use format=hf"
        )
    rotary = rotary_of(config)
    held = {"rope_type": rotary["rope_type"], "partial_rotary_factor": rotary.get("partial_rotary_factor", 1.0)}
    unknown = [] if held["rope_type"] in arch.rotary else ["rope_type"]
    unread = unread_rotary(config)
    held |= unread
    unknown += unread
    unknown += [] if arch.part_of_head or held["partial_rotary_factor"] == 1.0 else ["partial_rotary_factor"]
    for name, assumed in arch.assumed.items():
        value = assumed(config) if callable(assumed) else assumed
        held[name] = head_dim(config) if name == "head_dim" else getattr(config, name, value)
        if {"swish": "silu"}.get(str(held[name]), held[name]) != value:
            unknown.append(name)
    for name in (*arch.integers.values(), *arch.floats.values()):
        held[name] = getattr(config, name)
        if held[name] is None:
            unknown.append(name)
    if unknown:
        raise ModelError(
            f"{where}: {unknown[0]}={held[unknown[0]]!r} of this {config.model_type} model is nothing that readers of GGUF's "
            f"{arch.name!r} would find or that could be proved here; use format=hf"
        )
    return arch


def model_fields(config: Any, arch: Architecture) -> dict[str, Any]:
    """Return GGUF's keys and values that describe the model: integers, floats, text.

    Where readers have no sliding window, the context is no longer than it: within it every token attends to all before it,
    which is what they compute.
    """
    types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if "attention.sliding_window" in arch.integers or (types is not None and "sliding_attention" not in types):
        window = None  # the latter are Qwen's, whose configurations keep a window that no layer uses
    width = head_dim(config)
    fields: dict[str, Any] = {
        "context_length": min(config.max_position_embeddings, window or config.max_position_embeddings),
        "attention.key_length": width,
        "attention.value_length": width,
        **{key: int(getattr(config, name)) for key, name in (INTEGERS | dict(arch.integers)).items()},
        **{key: float(getattr(config, name)) for key, name in (FLOATS | dict(arch.floats)).items()},
        **arch.constants,
        **rotary_fields(config, arch),
    }
    described = {f"{arch.name}.{key}": value for key, value in fields.items()}
    return {"general.architecture": arch.name, "general.type": "model", **described}


class FileTensor(NamedTuple):
    """Tensor of a file, as the part of a model's tensor that it holds."""

    part: torch.Tensor
    """View of the model's tensor, its numbers in the file's order."""

    shape: tuple[int, ...]
    """Shape in the file."""

    more: float = 0.0
    """Number that is added to each."""

    def values(self) -> torch.Tensor:
        """Return the numbers that the file holds, before they are rounded."""
        values = self.part.reshape(self.shape)
        return values + self.more if self.more else values

    def fill(self, values: torch.Tensor) -> None:
        """Write a file's numbers into the model's tensor."""
        self.part.copy_(values.reshape(self.part.shape) - self.more)


def gguf_tensors(model: "PreTrainedModel", arch: Architecture, where: Path) -> dict[str, FileTensor]:
    """Return GGUF's name → the tensor of that name, without a tied head.

    They are views: nothing is copied before `FileTensor.values` is called.

    Raises:
        ModelError: a tensor has no name in GGUF.
    """
    state = model.state_dict()
    return {
        known: _file_tensor(name, known, view(state[name]), model.config, arch)
        for name, parts in names_in_file(state, model.config, arch, where).items()
        for known, view in parts.items()
    }


def names_in_file(names: Iterable[str], config: Any, arch: Architecture, where: Path) -> dict[str, Mapping[str, View]]:
    """Return a model's name of each tensor → GGUF's, each with the part that it holds.

    Raises:
        ModelError: as `gguf_tensors`.
    """
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == arch.name)
    table = get_tensor_name_map(kind, config.num_hidden_layers)
    found: dict[str, Mapping[str, View]] = {}
    for name in names:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        layer = _LAYER.fullmatch(name)
        if layer and layer[2] in arch.parts:
            found[name] = {f"blk.{layer[1]}.{end}": view for end, view in arch.parts[layer[2]].items()}
            continue
        known = table.get_name(name, try_suffixes=(".weight", ".bias"))
        if known is None:
            raise ModelError(f"{where}: the tensor {name} has no name in GGUF's {arch.name!r}; use format=hf")
        found[name] = {known: whole}
    return found


def _file_tensor(name: str, known: str, part: torch.Tensor, config: Any, arch: Architecture) -> FileTensor:
    heads = _rotated_heads(known, config, arch)
    more = 1.0 if arch.norms_from_zero and name.endswith("norm.weight") else 0.0
    return FileTensor(_pairs_together(part, heads) if heads else part, tuple(part.shape), more)


def _pairs_together(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Return a view of a tensor's rows in which the two of a rotated pair follow each other."""
    return tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2)


def _rotated_heads(name: str, config: Any, arch: Architecture) -> int:
    """Return the heads of a tensor whose rows the file orders differently; 0 for the others."""
    if not arch.neighbours:
        return 0
    if ".attn_q." in name:
        return int(config.num_attention_heads)
    return int(config.num_key_value_heads) if ".attn_k." in name else 0
