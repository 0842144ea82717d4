"""Compares a document of a packed row with itself alone, layer by layer.

It is for models whose rounding hides what they do as a whole. In bfloat16 a difference of one rounding grows with each layer,
and another number of rows is enough to make one: libraries choose their kernels by it (bitsandbytes multiplies in 4 bits by one
kernel for 7 rows and by another for 12). After dozens of layers it looks like a leak: 5 to 15 % of the values in a Llama of
random weights, up to 30 % in a mixture that then takes other experts.

Here it cannot grow: at the document's places each layer of the packed row is given what that layer was given when the document
was alone, so that their outputs differ by one layer's rounding. What a layer leaks still shows.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._modules import repeated_blocks

_ALONE = 0.1
"""Bound of the difference from the document alone, relative to what a layer adds to a token, beyond one rounding of the states.

Measured at half of the tokens: at most 0.004 by rounding (32 to 80 layers, dense and mixtures of experts; at single tokens that
get another expert up to 0.11), at least 0.36 where attention sees the other document or positions count on.
"""
_CHANGED = 0.02
"""Bound of the difference where only the other document's tokens changed, in the same measure, at all tokens.

The same kernels run on as many rows, so a document's own come out equal to the bit, or nearly where experts are given other
numbers of rows. Leaks of attention, states and convolutions made at least 0.19 at a token of a layer.
"""

Places = Callable[[int, int], Sequence[int] | None]


@attrs.frozen
class Run:
    """A forward of made-up tokens, and the places of a document in it."""

    forward: Callable[[], torch.Tensor]
    """Runs the model; returns hidden states (or logits) float[B, S, D] of all lines."""
    places: Places
    """(B, S) of hidden states → the document's places among the B * S; None where they are not those of this forward."""


def in_row(tokens: int, rows: Sequence[int]) -> Places:
    """Return the places `rows` of hidden states [1, T, D] of one row of T tokens."""
    return lambda lines, places: rows if (lines, places) == (1, tokens) else None


@attrs.frozen
class _Trace:
    """What blocks were given in a forward, and what came out, at a document's places."""

    blocks: list[nn.Module]
    """Block of each call, in the order of the forward; one that layers share is called several times."""
    states: list[torch.Tensor]
    """Inputs [S, D] of the calls, and the output of the last one."""
    final: torch.Tensor
    """The decoder's hidden states (or logits) [S, D]."""


def apart_by_layers(model: nn.Module, packed: Run, alone: Run, changed: Run, *, own: int = 0) -> bool:
    """Return whether each layer of a packed row gives a document what it gives it alone.

    Hidden states at the document's places are compared before the first block, after each, and at the end, by the norm of each
    token's difference. From the document alone it may be 0.1 of what the layer adds to the token, at half of the tokens, and
    0.02 of the states before the first one. Between rows that differ in the other document alone it may be 0.02 of that, at all
    tokens, for what a convolution carries on shows at the first few. One rounding of the states themselves is allowed in both.

    Args:
        model: bare or wrapped.
        packed: the packed row, or the lines that it is run in.
        alone: the document alone.
        changed: as `packed`, with other tokens outside of the document.
        own: last tokens of the document, such as a completion's, half of which must do so too; 0: all are alike.

    Returns:
        bool: False too where the model's blocks are not known, or are not called alike with hidden states [B, S, D].
    """
    if (reference := _trace(model, alone)) is None:
        return False
    ours, other = (_trace(model, run, reference) for run in (packed, changed))
    if ours is None or other is None:
        return False
    for number, excess in enumerate(_excesses(ours, reference)):
        # What the first layer is given was looked up, and rounding has not grown yet. A wrong position, where positions are
        # looked up too, shows there alone: each layer is then given the right one's states.
        within = (excess <= (_ALONE if number else _CHANGED)).float()
        if within.mean() < 0.5 or within[-own:].mean() < 0.5:
            return False
    return all(bool((excess <= _CHANGED).all()) for excess in _excesses(other, ours))


def _trace(model: nn.Module, run: Run, given: _Trace | None = None) -> _Trace | None:
    """Run a forward and record what its blocks are given.

    They are given the states of `given` in its place, once that is recorded.

    Returns:
        _Trace: None where no block is given hidden states, or blocks are called otherwise than in `given`.
    """
    blocks, inputs, outputs = list[nn.Module](), list[torch.Tensor](), list[torch.Tensor]()

    def before(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values = {**dict(enumerate(args)), **kwargs}
        name = next((name for name, value in values.items() if _places(run, value)), None)
        if name is None:
            return None
        call, states, places = len(blocks), values[name], _places(run, values[name])
        flat = states.flatten(0, 1)
        blocks.append(block)
        inputs.append(flat[places])
        if given is None or call >= len(given.blocks) or given.states[call].shape != inputs[-1].shape:
            return None
        flat = flat.clone()
        flat[places] = given.states[call].to(flat.dtype)
        values[name] = flat.view_as(states)
        return tuple(values[number] for number in range(len(args))), {key: values[key] for key in kwargs}

    def after(_block: nn.Module, _args: Any, output: Any) -> None:
        output = output[0] if isinstance(output, tuple) else output
        if places := _places(run, output):
            outputs.append(output.flatten(0, 1)[places])

    with ExitStack() as hooks:
        for block in repeated_blocks(model):
            hooks.callback(block.register_forward_pre_hook(before, with_kwargs=True).remove)
            hooks.callback(block.register_forward_hook(after).remove)
        out = run.forward()
    places = _places(run, out)
    if not blocks or not outputs or not places:
        return None
    found = _Trace(blocks, [*inputs, *outputs[-1:]], out.flatten(0, 1)[places])
    return found if given is None or _form(found) == _form(given) else None


def _places(run: Run, value: Any) -> list[int]:
    """Return the document's places in hidden states [B, S, D]; of anything else, none."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dim() != 3:
        return []
    return list(run.places(value.shape[0], value.shape[1]) or ())


def _form(trace: _Trace) -> tuple[list[nn.Module], list[torch.Size]]:
    return trace.blocks, [states.shape for states in (*trace.states, trace.final)]


def _excesses(ours: _Trace, theirs: _Trace) -> list[torch.Tensor]:
    """Return by how much tokens differ beyond one rounding: float32[S] for each layer.

    It is relative to what the layer adds; before the first layer and at the end, to the states themselves.
    """
    states, found = [each.float() for each in theirs.states], []
    added = [states[0], *(after - before if after.shape == before.shape else after for before, after in pairwise(states))]
    for mine, whole, size in zip(
        [*ours.states, ours.final], [*states, theirs.final.float()], [*added, theirs.final.float()], strict=True
    ):
        rounding = _eps(mine) * whole.norm(dim=-1)
        difference = (mine.float() - whole).norm(dim=-1) - rounding
        # Where a layer adds nothing, nothing may differ; NaN stays NaN, which is within no bound.
        found.append(difference.clamp(min=0) / size.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny))
    return found


def _eps(states: torch.Tensor) -> float:
    """Return the relative size of one rounding of states, or of autocast's."""
    kind, own = states.device.type, torch.finfo(states.dtype).eps
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return max(own, torch.finfo(torch.get_autocast_dtype(kind)).eps)
    return own
