"""Rotary positions that go by the length of a forward.

longrope's do, and dynamic NTK's, which also remember a longer one.
"""

from torch import nn

from forge_algos._modules import causal_model, text_config


def growing_positions(model: nn.Module, longest: int | None) -> bool:
    """Return whether rotary positions may go by the longest document of a forward."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or {}
    # One kind for all layers, or one for each type of layer.
    kinds = [rope] if "rope_type" in rope else [kind for kind in rope.values() if isinstance(kind, dict)]
    for kind in kinds:
        limit = kind.get("original_max_position_embeddings") or getattr(config, "max_position_embeddings", None)
        if kind.get("rope_type") in ("longrope", "dynamic") and (longest is None or limit is None or longest > limit):
            return True
    return False


def reset_frequencies(model: nn.Module) -> None:
    """Set dynamic NTK's rotary frequencies to what they are before the first forward.

    transformers lets them grow with the longest forward so far, and keeps them until one is shorter than
    `original_max_seq_len`: a forward between the two would depend on which came before it.
    """
    if not growing_positions(model, None):
        return
    for module in causal_model(model).modules():
        first = getattr(module, "original_max_seq_len", None)
        if first is None:
            continue
        for name, _ in list(module.named_buffers(recurse=False)):
            # One for all layers, or one for each type of layer, whose name stands before it.
            prefix, known, end = name.rpartition("inv_freq")
            grown = getattr(module, f"{prefix}max_seq_len_cached", None)
            if not known or end or grown is None:
                continue
            if (original := getattr(module, f"{prefix}original_inv_freq", None)) is not None and grown != first:
                setattr(module, name, original.to(getattr(module, name).device))
                setattr(module, f"{prefix}max_seq_len_cached", first)
