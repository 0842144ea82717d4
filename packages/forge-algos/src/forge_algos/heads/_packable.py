"""A model that is about to be trained on packed rows → shown to keep their documents apart, or refused."""

import torch
from torch import nn

from forge_algos._modules import virtual_tokens
from forge_algos.heads._virtual_tokens import require_lines
from forge_algos.isolation._isolation import require_isolation


def require_packable(model: nn.Module, *, device: torch.device) -> None:
    """Raise unless documents of one row are to this model what they are alone, in the way in which it is fed them (`lay_out`).

    Raises:
        PackedBatchError: it does not keep them apart; two made-up ones are tried.
        AdapterError: its virtual tokens cannot stand before each document.
    """
    if virtual_tokens(model):
        require_lines(model, device=device)
    else:
        require_isolation(model, device=device)
