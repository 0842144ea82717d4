"""Entries of a configuration that training needs otherwise than they are."""

from typing import TYPE_CHECKING

import torch
from torch import nn

from forge_dist.loading._task import preserved_random_state

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_NEEDED = {
    # Outputs are read by their names.
    "return_dict": True,
    # RWKV halves weights in place whenever it changes to evaluation mode, and an evaluation or an export would see those.
    "rescale_every": 0,
}
_ALIGNED = 8
"""Numbers of which rows of a grouped product are a multiple: 16 bytes in 16 bits, in which float32 weights may be gathered."""
_AS_READ = "_config_as_read"
"""Attribute of a loaded model: the entries that were changed, as they were."""


def change_config(model: "PreTrainedModel") -> None:
    """Set the entries of a model's configuration that training needs."""
    config = model.config
    changed = {name: getattr(config, name) for name, value in _NEEDED.items() if getattr(config, name, value) != value}
    setattr(model, _AS_READ, changed)
    for name in changed:
        setattr(config, name, _NEEDED[name])
    choose_experts(model)
    if _zeroes_padding_row(model):
        config.get_text_config().pad_token_id = None


def choose_experts(model: "PreTrainedModel") -> None:
    """Compute experts one after the other where a grouped product refuses their rows.

    transformers takes torch.nn.functional.grouped_mm by default.
    """
    if unaligned_experts(model) is not None:
        model.set_experts_implementation("eager")


def unaligned_experts(model: "PreTrainedModel") -> str | None:
    """Say why experts are computed one after the other; None where a grouped product takes them."""
    if not set(model.get_experts_implementation().values()) & {"grouped_mm", "eager"}:
        return None
    for name, weight in model.named_parameters():
        if weight.dim() == 3 and "experts" in name.split(".") and any(size % _ALIGNED for size in weight.shape[1:]):
            return (
                f"one after the other: a grouped product takes sizes that are multiples of {_ALIGNED}, and {name} is "
                f"{list(weight.shape)}"
            )
    return None


def _zeroes_padding_row(model: "PreTrainedModel") -> bool:
    """Return whether reading the model sets the padding token's row of its embeddings to zero.

    Youtu's `_init_weights` takes a row of a weight that was read for one that was not (5.23). Where the head is tied to the
    embeddings that row is trained, and plain transformers would read another than was written, unless the configuration names
    no padding token, which the tokenizer names too.
    """
    from transformers import initialization

    if getattr(model.get_input_embeddings(), "padding_idx", None) is None:
        return False
    # What is drawn here is not the run's: its own numbers would be others.
    with torch.no_grad(), preserved_random_state(), initialization.guard_torch_init_functions():
        read = nn.Embedding(1, 1, padding_idx=0, device="cpu", dtype=torch.float32)
        read.weight._is_hf_initialized = True  # pyrefly: ignore[missing-attribute]  transformers' mark of what it has read
        read.weight.fill_(1.0)
        model._init_weights(read)
    return read.weight.item() == 0.0


def restore_config(config: "PreTrainedConfig", model: "PreTrainedModel") -> None:
    """Set the changed entries of `config`, of an export of `model`, to what was loaded."""
    for name, value in getattr(model, _AS_READ, {}).items():
        setattr(config, name, value)
