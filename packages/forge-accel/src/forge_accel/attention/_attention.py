"""The choice of an attention implementation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from forge_accel._errors import AccelError

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

BUILT_IN = {
    "sdpa": "sdpa: asked for; a packed row pays a dense [T, T] mask",
    "eager": "eager: asked for; every score matrix is held in memory, and every variant of attention is supported",
}
"""Attention implementations of transformers, each with its reason for the log."""


FLASH = {"flash3": "FA3", "flash4": "FA4"}
"""Document attention by newer flash kernels: its name in settings, and that of the kernels in torch."""


@attrs.frozen
class Attention:
    """Attention implementation: its name in a model's configuration, and its function."""

    name: str
    """Value of `attn_implementation` that a model is loaded with."""

    function: Callable[..., tuple[torch.Tensor, None]] | None = None
    """Function with transformers' attention signature, to be registered under `name`; None for transformers' own."""


def check_attention(name: str) -> None:
    """Check that an attention implementation exists.

    Raises:
        AccelError: `name` is none of auto, documents, flash3, flash4, sdpa, eager.

    """
    if name not in {"auto", "documents", *FLASH, *BUILT_IN}:
        raise AccelError(f"attention={name!r} is unknown; known are auto, documents, {', '.join([*FLASH, *BUILT_IN])}.")
