"""What the probes found on a small model with numbers → the same found on a model without.

How documents are kept apart, how the head is scored and whether prompts are shared is tried on a model's own outputs, which
one without data does not have. The architecture decides it, so a small random model of the same configuration is asked in its
place.
"""

from typing import Literal

import torch
from torch import nn

from forge_algos._modules import attention_of, causal_model
from forge_algos.batches import _media
from forge_algos.batches._media import Way
from forge_algos.heads import _head, _packable
from forge_algos.isolation import _alone, _isolation, _layers, _prompt_sharing


def adopt_findings(
    model: nn.Module, draft: nn.Module | None, *, device: torch.device, packing: Literal["on", "off"] = "on"
) -> None:
    """Let `model`, before an adapter is attached, pass for probed with the findings of `draft`.

    Args:
        model: a causal model, bare, whose numbers are never read.
        draft: small model of the same configuration and attention, through `keep_documents_apart`; None where there is none:
            then `packing` is taken as it is, and the head and the prompts as most architectures have them.
        device: of both.
        packing: whether rows are packed, without a draft.
    """
    if draft is None:
        if packing == "off":
            _alone.run_alone_as(model, None)
        return
    if _alone.runs_alone(draft):
        _alone.run_alone_as(model, draft)
    elif _layers.divided_layers(draft):
        _layers.divide_layers(model)
    found = _head.choose_head(draft, device=device)
    _head.assume(model, found.name, f"as in a small random model: {found.reason}")
    share, why = _prompt_sharing.shares_prompts(draft, device=device)
    _prompt_sharing.assume(model, share=share, why=why, device=device)


def pass_for_probed(model: nn.Module, *, device: torch.device, media_way: Way | None = None) -> None:
    """Let the outermost module `model` pass for one whose documents were found to stay apart."""
    causal = causal_model(model)
    for module in (model, causal):
        # Where rows of text run alone, several documents with images are laid out in lines.
        _media.set_packed(module, media_way or ("lines" if _alone.runs_alone(causal) else "bounds"))
        _isolation._passed[module] = _packable._passed[module] = attention_of(causal), device
    _media.lay_texts_alike(causal, alike=media_way not in (None, "bounds") and _alone.runs_alone(causal))
    if causal not in _head._assumed:
        _head.assume(causal, "chunked", "assumed: no small model of its configuration can be made")
    if causal not in _prompt_sharing._answers:
        _prompt_sharing.assume(
            causal, share=True, why="assumed: no small model of its configuration can be made", device=device
        )
