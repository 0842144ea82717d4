"""Exact causal attention of whole samples, by torch's SDPA.

The last query is at the last key: with more keys than queries (a KV cache), the queries are the newest positions. torch's
own `is_causal=True` aligns them to the first key instead, and is right only where both lengths agree.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from forge_accel.attention._varlen import compute_dtype, fits_kernel

if TYPE_CHECKING:
    from collections.abc import Callable


_SHORT = 128
"""Queries up to which a CPU attends in float32 where bfloat16 is asked for. With 9 heads of 64, on a processor with bf16 matrix
units, torch's backward in bfloat16 takes 9 times as long with 16 queries, 4.6 with 59, 2.4 with 128, and as long with 256.
"""


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend to one's own position and those before it, or to the last `window` of them.

    Args:
        query: [B, H, S, head]; H is a multiple of the number of key heads (grouped-query attention).
        key: [B, Hk, S', head] with S' >= S.
        value: [B, Hk, S', value head].
        window: Positions that a query attends to, its own included; None is all.
        scaling: Factor of the scores; None is head ** -0.5.
        dropout: Probability of dropping a weight.
        softcap: Cap c of the scores s, c · tanh(s / c); None: they have none. The scores are then held in memory.
        sinks: [H], a score that each head has beside those of the keys, and that brings no value; None: there is none.

    Returns:
        [B, H, S, value head], in the dtype of `value`.

    """
    attend = partial(sdpa, scaling=scaling, dropout=dropout, softcap=softcap, sinks=sinks)
    queries = query.shape[2]
    if window is not None and key.shape[2] > queries + window - 1:
        # No query attends farther back.
        key, value = key[:, :, 1 - queries - window :], value[:, :, 1 - queries - window :]
    keys = key.shape[2]
    if queries == 1:
        # Decoding: the newest position attends to all that is left; no mask is needed.
        return attend(query, key, value)
    if window is not None and keys > window:
        return _windowed(query, key, value, window, attend)
    if queries == keys:
        return attend(query, key, value, causal=True)
    return attend(query, key, value, mask=causal_mask(queries, keys, None, query.device))


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call torch's SDPA, with grouped heads in the way that is fast on the device.

    Arguments are those of `causal_attention`; the mask is bool or additive, [queries, keys] or broadcast to the scores.
    """
    if causal and (softcap is not None or sinks is not None):
        mask = causal_mask(query.shape[2], key.shape[2], None, query.device)
        causal = False
    head, scaling = value.shape[3], query.shape[3] ** -0.5 if scaling is None else scaling
    if sinks is not None:
        query, key, value, mask = _with_sinks(query, key, value, mask, sinks / scaling)
    if softcap is not None:
        return _capped(query, key, value, mask, scaling, dropout, softcap, sinks=sinks is not None)[..., :head]
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and query.device.type != "cpu" and not (mask is None and fits_kernel(query, value)):
        # Of a GPU's kernels only flash takes grouped heads: 16 bits, no mask. The others would form the scores.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        groups = 1
    attend = partial(scaled_dot_product_attention, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=groups > 1)
    asked = compute_dtype(query)
    if query.device.type != "cpu" or (dtype := dtype_on_cpu(asked, query.shape[2])) == asked:
        return attend(query, key, value, attn_mask=mask)[..., :head]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    # Rounded as they would be; autocast would turn them back.
    query, key, value = (tensor.to(asked).to(dtype) for tensor in (query, key, value))
    with torch.autocast("cpu", enabled=False):
        return attend(query, key, value, attn_mask=mask)[..., :head].to(asked)


def dtype_on_cpu(dtype: torch.dtype, queries: int) -> torch.dtype:
    """Return the dtype in which a CPU attends with so many queries where `dtype` is asked for."""
    return torch.float32 if dtype == torch.bfloat16 and 1 < queries <= _SHORT else dtype


def _with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Put a first key whose product with each query is its head's sink, and whose value is 0.

    A further channel has the sink in the queries, 1 in that key and 0 in all others, so gradients reach the sinks too.
    Values get as many channels as the keys, as SDPA's fast ways want them.
    """
    # A sink of minus infinity is none; times 0 it would be NaN.
    channel = sinks.to(query.dtype).clamp_min(torch.finfo(query.dtype).min / 4).view(1, -1, 1, 1).expand(*query.shape[:3], 1)
    query = torch.cat((query, channel), dim=3)
    first = torch.zeros_like(key[:, :, :1])
    key = torch.cat((pad(first, (0, 1), value=1.0), pad(key, (0, 1))), dim=2)
    value = pad(value, (0, max(0, key.shape[3] - value.shape[3]), 1, 0))
    if mask is not None:
        mask = pad(mask, (1, 0), value=True if mask.dtype == torch.bool else 0.0)
    return query, key, value, mask


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    dropout: float,
    softcap: float,
    *,
    sinks: bool,
) -> torch.Tensor:
    """Compute attention with capped scores, which are formed.
    A sink, the first key, is not capped.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    scores = query @ key.transpose(2, 3) * scaling
    capped = torch.tanh(scores[..., sinks:] / softcap) * softcap
    scores = torch.cat((scores[..., :1], capped), dim=3) if sinks else capped
    if mask is not None:
        # Not minus infinity: a query that sees nothing, as a place of padding, would be NaN, and its value everybody's.
        least = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, least) if mask.dtype == torch.bool else (scores + mask).clamp_min(least)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.dropout(weights, dropout, train=dropout > 0) @ value


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, attend: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """Attend within a window, `window` queries at a time.

    Each block of queries attends to the keys of its own block and of the one before, so work and masks grow with S x window,
    not S x S. There are at most window - 1 more keys than queries. Split and concatenated, because the gradient of a slice
    is a tensor of the whole length, once for each slice.
    """
    before = key.shape[2] - query.shape[2]  # keys of a cache, or of a shared prompt: fewer than the window
    blocks = [min(window, query.shape[2] - start) for start in range(0, query.shape[2], window)]
    queries = query.split(blocks, dim=2)
    keys, values = key.split([before, *blocks], dim=2), value.split([before, *blocks], dim=2)
    mask = causal_mask(window, 2 * window, window, query.device)
    outputs = []
    for block, size in enumerate(blocks):
        behind = keys[block].shape[2]
        outputs.append(
            attend(
                queries[block],
                torch.cat((keys[block], keys[block + 1]), dim=2),
                torch.cat((values[block], values[block + 1]), dim=2),
                mask=mask[:size, window - behind : window + size],
            )
            if behind
            else attend(queries[block], keys[1], values[1], causal=True)
        )
    return torch.cat(outputs, dim=2)


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Make the mask of the newest `queries` of `keys` positions: bool [queries, keys].

    True is where a query attends; the last query is at the last key.
    """
    behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    mask = behind >= 0
    return mask if window is None else mask & (behind < window)
