"""Exact causal attention of whole samples, by torch's SDPA.

The last query is at the last key: with more keys than queries (a KV cache), the queries are the newest positions. torch's
own `is_causal=True` aligns them to the first key instead, and is right only where both lengths agree.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    window: int | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Attend to one's own position and those before it, or to the last `window` of them.

    Args:
        query: [B, H, S, head]; H is a multiple of the number of key heads (grouped-query attention).
        key: [B, Hk, S', head] with S' >= S.
        value: [B, Hk, S', value head].
        window: Positions that a query attends to, its own included; None is all.
        scaling: Factor of the scores; None is head ** -0.5.
        dropout: Probability of dropping a weight.

    Returns:
        [B, H, S, value head], in the dtype of `value`.

    """
    queries = query.shape[2]
    if window is not None and key.shape[2] > queries + window - 1:
        # No query attends farther back.
        key, value = key[:, :, 1 - queries - window :], value[:, :, 1 - queries - window :]
    keys = key.shape[2]
    if queries == 1:
        # Decoding: the newest position attends to all that is left; no mask is needed.
        return sdpa(query, key, value, scaling=scaling, dropout=dropout)
    if window is not None and keys > window:
        return _windowed(query, key, value, window, scaling=scaling, dropout=dropout)
    if queries == keys:
        return sdpa(query, key, value, causal=True, scaling=scaling, dropout=dropout)
    return sdpa(query, key, value, mask=_causal_mask(queries, keys, None, query.device), scaling=scaling, dropout=dropout)


def sdpa(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    scaling: float | None = None,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Call torch's SDPA, with grouped heads in the way that is fast on the device.

    Shapes are those of `causal_attention`; the mask is bool or additive, [queries, keys] or broadcast to the scores.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and query.device.type != "cpu":
        # A GPU's kernels take either grouped heads or a mask; together they fall back to explicit score matrices.
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        groups = 1
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scaling, enable_gqa=groups > 1
    )


def _windowed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, *, scaling: float | None, dropout: float
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
    mask = _causal_mask(window, 2 * window, window, query.device)
    outputs = []
    for block, size in enumerate(blocks):
        behind = keys[block].shape[2]
        outputs.append(
            sdpa(
                queries[block],
                torch.cat((keys[block], keys[block + 1]), dim=2),
                torch.cat((values[block], values[block + 1]), dim=2),
                mask=mask[:size, window - behind : window + size],
                scaling=scaling,
                dropout=dropout,
            )
            if behind
            else sdpa(queries[block], keys[1], values[1], causal=True, scaling=scaling, dropout=dropout)
        )
    return torch.cat(outputs, dim=2)


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Make the mask of the newest `queries` of `keys` positions: bool [queries, keys].

    True is where a query attends; the last query is at the last key.
    """
    behind = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None, :]
    mask = behind >= 0
    return mask if window is None else mask & (behind < window)
