"""Noise on a row's embeddings in training mode (NEFTune, arXiv 2310.05914)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model, embeddings, virtual_tokens
from forge_algos.isolation._alone import lengths_of_lines


def require_embeddings(model: nn.Module) -> None:
    """Raise unless the model names the layer that noise is put on.

    Raises:
        LossError: it names none.
    """
    if embeddings(model) is None:
        raise LossError(
            f"neftune_alpha: {type(causal_model(model)).__name__} names no input embeddings to put noise on; set it to 0"
        )


@contextmanager
def noisy_embeddings(model: nn.Module, alpha: float, boundaries: torch.Tensor) -> Iterator[None]:
    """Add uniform noise within ±alpha / √(S·D) to a row's embeddings inside the block.

    There is none in evaluation mode. S is the length of a token's own document and D the width, so that a document's noise does
    not depend on what it is packed with. The noise is drawn from torch's own generator of the device, which the caller's seed
    decides, within the embedding layer's call: wrappers, adapters and sharding do not notice it.

    Args:
        model: bare or wrapped.
        alpha: 0 is none.
        boundaries: int[B+1], where documents begin, and T; on the row's device.
    """
    layer = embeddings(model) if alpha and model.training else None
    if layer is None:
        yield
        return
    lengths = boundaries.diff()

    def add_noise(_layer: nn.Module, _args: Any, found: torch.Tensor) -> torch.Tensor:
        lines = lengths_of_lines(model)
        # With virtual tokens each document is a line of its own, and so it may be with images.
        if lines is None and (virtual_tokens(model) or found.shape[0] > 1):
            lines = lengths
        # [B, 1] for lines, which hold one document each, or [T].
        S = lengths.repeat_interleave(lengths, output_size=found.shape[-2]) if lines is None else lines[:, None]
        # In float32, since the product may exceed int32.
        most = alpha / (S.float() * found.shape[-1]).sqrt()
        return found + torch.empty_like(found).uniform_(-1.0, 1.0) * most[..., None].to(found.dtype)

    handle = layer.register_forward_hook(add_noise)
    try:
        yield
    finally:
        handle.remove()
