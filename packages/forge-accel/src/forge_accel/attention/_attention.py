"""What an accelerator answers when it is asked which attention to use."""

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
"""Attention that transformers brings along, with what the log says about it."""


@attrs.frozen
class Attention:
    """An attention implementation: the name that a model's configuration carries, and what to register under it."""

    name: str
    """What to load a model with, as `attn_implementation`."""

    function: Callable[..., tuple[torch.Tensor, None]] | None = None
    """With transformers' attention signature, to be registered under `name`; None where transformers brings it along."""


def check_wish(wish: str) -> None:
    """Refuse an attention that does not exist.

    Raises:
        AccelError: `wish` is none of auto, documents, sdpa, eager.

    """
    if wish not in {"auto", "documents", *BUILT_IN}:
        raise AccelError(f"attention={wish!r} is unknown; known are auto, documents, {', '.join(BUILT_IN)}.")
