"""Arguments by which a model is fed a packed row, and the way back to the row's own order.

Most models are fed the row itself. Virtual tokens (prefix and prompt tuning) stand before a document, and a row has no place
for them between its documents; and some models keep documents with images apart in lines alone. There each document becomes a
line of its own, padded on the right under a mask, all lines in one forward.
"""

from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._errors import PackedBatchError
from forge_algos._modules import virtual_tokens
from forge_algos.batches._media import LINES
from forge_algos.isolation._prompt_sharing import require_sharing
from forge_algos.isolation._rows import OF_ROWS


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
    shares, of_media = inputs.get("kv_rows") is not None, inputs.get(LINES)
    if not virtual_tokens(model) and of_media is None:
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

    def in_lines(row: torch.Tensor) -> torch.Tensor:
        padded = row.new_zeros(documents, width)
        padded[lines, columns] = row
        return padded

    further = {} if of_media is None else {name: value for name, value in inputs.items() if name not in (*OF_ROWS, LINES)}
    further |= {name: in_lines(inputs[name][0]) for name in of_media or ()}
    return Layout(
        # No positions: PEFT computes them from the mask and counts its virtual tokens among them, a model those of images.
        inputs={**further, "input_ids": in_lines(ids), "attention_mask": in_lines(torch.ones_like(ids)), "use_cache": False},
        lines=lines,
        columns=columns,
        width=width,
    )
