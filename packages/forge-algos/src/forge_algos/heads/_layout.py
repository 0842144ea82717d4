"""Arguments by which a model is fed a packed row, and the way back to the row's own order.

Most models are fed the row itself. Virtual tokens (prefix and prompt tuning) stand before a document, and a row has no place
for them between its documents: there each document becomes a line of its own, padded on the right under a mask, all lines in
one forward.
"""

from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import virtual_tokens
from forge_algos.isolation._prompt_sharing import require_sharing


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """One packed row [1, T] as one forward."""

    inputs: dict[str, Any]
    """The forward's arguments."""
    lines: torch.Tensor | None = None
    """int64[T]: line of each token of the row; None: the row is fed as it is."""
    columns: torch.Tensor | None = None
    """int64[T]: place of each token in its line."""
    width: int = 0
    """Number of places in a line, without virtual tokens."""

    def packed(self, hidden: torch.Tensor) -> torch.Tensor:
        """Put float[B, S, ...] of the forward's places into the row's order: float[1, T, ...]."""
        if self.lines is None or self.columns is None:
            return hidden
        places = hidden.shape[1]
        # Virtual tokens have places, the first ones, only as embeddings and only while the adapter is on.
        where = self.lines * places + self.columns + (places - self.width)
        return hidden.flatten(0, 1).index_select(0, where)[None]


def lay_out(model: nn.Module, inputs: dict[str, Any]) -> Layout:
    """Lay out the packed row of `packed_inputs` as `model` is fed it.
    It waits for no device, and so checks positions on the CPU only.

    Raises:
        PackedBatchError: the model has virtual tokens, and a document's beginning lies elsewhere: a line would lack it. Or
            samples share what they begin with, and the model was not shown to do that.
    """
    shares = inputs.get("kv_rows") is not None
    if not virtual_tokens(model):
        if shares:
            require_sharing(model)
        return Layout(inputs=inputs)
    if shares:
        raise PackedBatchError(
            "completions that share a prompt (kv_rows) came to a model with virtual tokens, where each needs a prompt of its "
            "own: collate with share_prompt=False, as forge_algos.shares_prompts reports"
        )
    ids, columns, boundaries = inputs["input_ids"][0], inputs["position_ids"][0], inputs["cu_seq_lens_q"]
    documents, width = len(boundaries) - 1, int(inputs["max_length_q"])
    numbers = torch.arange(documents, device=ids.device)
    lines = numbers.repeat_interleave(boundaries.diff(), output_size=len(ids))
    if columns.device.type == "cpu" and not torch.equal(columns, torch.arange(len(ids)) - boundaries[lines]):
        raise PackedBatchError(
            "position_ids of a row for a model with virtual tokens must count each document of cu_seq_lens_q from 0: its line "
            "has places for nothing else"
        )
    padded = ids.new_zeros(documents, width)
    mask = torch.zeros_like(padded)
    padded[lines, columns] = ids
    mask[lines, columns] = 1
    return Layout(
        # No positions: PEFT computes them from the mask and counts its virtual tokens among them.
        inputs={"input_ids": padded, "attention_mask": mask, "use_cache": False},
        lines=lines,
        columns=columns,
        width=width,
    )
