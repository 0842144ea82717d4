"""Embeddings of the documents of a packed row: their last, first or mean hidden state."""

from typing import Any, Literal

import attrs
import torch
from torch import nn

from forge_algos._errors import LossError
from forge_algos._modules import causal_model, headless, virtual_tokens
from forge_algos.heads._layout import lay_out
from forge_algos.heads._rows_over_ranks import NAME

Pool = Literal["last", "mean", "cls"]
"""Which hidden states of a text are its embedding: that of its last token, their mean, that of its first token."""


@attrs.frozen(kw_only=True, eq=False)
class Embedder:
    """Embeddings of texts, each of which is a document of a packed row."""

    model: nn.Module = attrs.field(repr=False)
    pooling: Pool

    def __call__(self, inputs: dict[str, Any], boundaries: torch.Tensor) -> torch.Tensor:
        """Embed the B documents of one row [1, T] in one forward: float32[B, D], of any length.

        float64 where the model is.

        Args:
            inputs: of the forward.
            boundaries: int[B+1], where documents begin, and T.
        """
        layout = lay_out(self.model, inputs)
        hidden = layout.packed(self.model(**layout.inputs).last_hidden_state)[0]
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        if self.pooling == "mean":
            with torch.autocast(hidden.device.type, enabled=False):
                return torch.segment_reduce(hidden.to(dtype), "mean", lengths=boundaries.diff().to(torch.int64))
        places = boundaries[1:] - 1 if self.pooling == "last" else boundaries[:-1]
        return hidden.index_select(0, places).to(dtype)


def choose_embedder(model: nn.Module, *, pooling: Pool) -> Embedder:
    """Return what embeds with a model, if its output is the hidden states.

    Raises:
        LossError: the model has a head, virtual tokens, or rows that several ranks share.
    """
    causal = causal_model(model)
    if not headless(causal):
        raise LossError(
            f"{type(causal).__name__} has a head, and embeddings are read from hidden states: load the model with "
            "transformers' AutoModel"
        )
    if virtual_tokens(model):
        raise LossError(
            "virtual tokens before a text are no part of its embedding: take adapter=lora in place of prefix or prompt"
        )
    if hasattr(causal, NAME):
        raise LossError("several ranks share each row (cp_size), and an embedding needs the whole of a text: use cp_size=1")
    return Embedder(model=model, pooling=pooling)
