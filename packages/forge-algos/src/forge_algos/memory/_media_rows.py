"""Masks of a model without numbers → how a loaded one will take rows with images.

What a loaded model keeps apart is tried on its outputs, which one without data does not have. But the masks that it makes for
its layers follow from ids, positions and token types, which have data: a row is packed if its masks are those of its documents
alone, and keep them apart. Where the tokens of an image see those behind them, attention that reads no masks is no choice.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from forge_algos._modules import attention_of, causal_model, language_modules, mode, repeated_blocks
from forge_algos.batches._media import MediaInputs, Way, go_by_lines, set_packed
from forge_algos.heads._media import MediaDocument, has_experts, longer, run_documents, set_attention, words_of
from forge_algos.isolation._isolation import made_up_lengths


class ExpectedRows(NamedTuple):
    """Rows with images as a model of this configuration should take them."""

    way: Way | None
    """How they may hold several documents; None: they hold one."""
    ahead: bool
    """Whether tokens of an image see those behind them."""


def expected_media_rows(
    model: nn.Module,
    documents: Sequence[MediaDocument],
    *,
    device: torch.device,
    packing: bool,
    join: Callable[[Sequence[MediaInputs]], Sequence[MediaInputs]] = list,
) -> ExpectedRows:
    """Find by its masks what `pack_media` should find of a loaded model; arguments as of that.

    A layer that is given no mask is causal, or is taken for one that needs none.
    """
    first, second = documents[:2]
    least, more = made_up_lengths(model)
    pair = longer(first, max(least - len(first.input_ids), 0) + 3), longer(second, max(more - len(second.input_ids), 0))
    text = MediaDocument(np.asarray(first.input_ids)[words_of(first)], {}, ())
    row = [text, pair[0], text, pair[1]]
    own = attention_of(causal_model(model))
    set_packed(model, "bounds")
    set_attention(causal_model(model), "sdpa")  # which is given every mask
    try:
        with mode(model, training=False), torch.no_grad():
            alone = [_masks(model, [each], [each.inputs], device) for each in row]
            packed = _masks(model, row, join([each.inputs for each in row]), device)
    finally:
        set_attention(causal_model(model), own)
    ahead = any(mask is not None and bool(mask.triu(1).any()) for masks in alone for mask in masks)
    ends = np.cumsum([0, *(len(each.input_ids) for each in row)]).tolist()
    if packing and all(_apart(mask, list(parts), ends) for mask, *parts in zip(packed, *alone, strict=True)):
        return ExpectedRows("bounds", ahead)
    ids = torch.as_tensor(np.asarray(first.input_ids, np.int64))
    return ExpectedRows(None if has_experts(model) or go_by_lines(model, ids, first.inputs) else "lines", ahead)


def _masks(
    model: nn.Module, documents: Sequence[MediaDocument], media: Sequence[MediaInputs], device: torch.device
) -> list[torch.Tensor | None]:
    """Return the mask bool[T, T] that each layer of the language part is given.

    None where it is given none with data.
    """
    found: list[torch.Tensor | None] = []

    def see(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [each for each in (*args, *kwargs.values()) if type(each) is torch.Tensor]
        masks = [each[0, 0] for each in given if each.dim() == 4 and each.dtype == torch.bool]
        found.append(masks[0] if masks else None)

    language = language_modules(model)
    with ExitStack() as hooks:
        for block in (each for each in repeated_blocks(model) if each in language):
            hooks.callback(block.register_forward_pre_hook(see, with_kwargs=True).remove)
        ids = [torch.tensor(np.asarray(each.input_ids), dtype=torch.int64, device=device) for each in documents]
        run_documents(model, ids, media)
    return found


def _apart(mask: torch.Tensor | None, alone: Sequence[torch.Tensor | None], ends: Sequence[int]) -> bool:
    """Return whether the mask of a row is that of its documents by themselves."""
    if mask is None:
        return True
    expected = torch.zeros_like(mask)
    for (start, stop), own in zip(pairwise(ends), alone, strict=True):
        block = expected[start:stop, start:stop]
        block.copy_(torch.ones_like(block).tril() if own is None else own)
    return torch.equal(mask, expected)
