"""Document attention on a CPU as one operator, which `torch.compile` does not trace.

How many samples a row holds is in the values of a tensor, and a graph that depended on them would be one for each row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch.nn.functional import pad

from forge_accel._dtypes import bfloat16
from forge_accel.attention._causal import causal_mask
from forge_accel.attention._refusals import document_lengths, key_lengths
from forge_accel.attention._varlen import compute_dtype

_BLOCK = 32
"""Rows of the smallest blocks of queries that torch's kernel computes."""
_SHORT, _SHORT_BACKWARD = 64, 256
"""Queries up to which both passes, and the backward alone, are computed in float32 where bfloat16 is asked for.

With 9 heads of 64, on a processor with bf16 matrix units, torch's backward in bfloat16 takes 10 times as long with 16 queries,
2.5 with 128, 1.1 with 256, and as long with 320; without those units 1.8 times as long with 256. Its forward takes as long
with 48 queries, and less than half with 128.
"""


def opaque_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    *,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Compute document attention of a packed row on a CPU by one operator of a graph.

    Args:
        query: [1, H, T, head].
        key: [1, Hk, T', head].
        value: [1, Hk, T', head], of the same head size.
        cu_seqlens: Where the samples end, integers [samples + 1].
        cu_seqlens_k: Where they end among the keys; None: each sample's keys are its own.
        window: Positions that a token attends to, its own included; None is all.
        scaling: Factor of the scores; None is head ** -0.5.

    Returns:
        [1, T, H, head].

    """
    dtype = compute_dtype(query)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    ends_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    return _documents(query, key, value, cu_seqlens, ends_k, window or 0, scaling or query.shape[3] ** -0.5)[0]


@torch.library.custom_op("forge_accel::documents", mutates_args=())
def _documents(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends: torch.Tensor,
    ends_k: torch.Tensor,
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs [1, T, H, head] and the scores' logsumexp, float32 [1, T, H]."""
    out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    sums = query.new_empty(1, query.shape[2], query.shape[1], dtype=torch.float32)
    query, key, value = _as_read(query, key, value)
    for mine, seen, causal, added in _samples(query, key, ends, ends_k, window):
        length = mine.stop - mine.start
        dtype = _dtype_of(query, length, _SHORT)
        states = query[:, :, mine].to(dtype), key[:, :, seen].to(dtype), value[:, :, seen].to(dtype)
        mask = None if added is None else added.to(dtype)
        if dtype == bfloat16:
            *states, mask = _in_whole_blocks(*states, mask)
        found, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *states, 0.0, causal, attn_mask=mask, scale=scaling
        )
        out[:, mine], sums[:, mine] = found[:, :, :length].transpose(1, 2), logsumexp[:, :, :length].transpose(1, 2)
    return out, sums


def _dtype_of(states: torch.Tensor, queries: int, most: int) -> torch.dtype:
    """Return float32 for at most so many queries in bfloat16, and otherwise their own dtype."""
    return torch.float32 if states.dtype == bfloat16 and queries <= most else states.dtype


def _in_whole_blocks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Lengthen a sample to a multiple of `_BLOCK`, by keys that none of its queries sees.

    With matrix units (amx_bf16) each thread of torch's kernel compiles products for the rest of each length that it meets, and
    keeps them all.
    """
    queries, keys = (-states.shape[2] % _BLOCK for states in (query, key))
    if mask is not None:
        mask = pad(pad(mask, (0, keys), value=float("-inf")), (0, 0, 0, queries))
    query, key, value = (
        pad(states, (0, 0, 0, more)) if more else states for states, more in ((query, queries), (key, keys), (value, keys))
    )
    return query, key, value, mask


@_documents.register_fake
def _(
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001 - the signature of the operator
    value: torch.Tensor,  # noqa: ARG001
    ends: torch.Tensor,  # noqa: ARG001
    ends_k: torch.Tensor,  # noqa: ARG001
    window: int,  # noqa: ARG001
    scaling: float,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor]:
    out = query.new_empty(1, query.shape[2], query.shape[1], query.shape[3])
    return out, query.new_empty(1, query.shape[2], query.shape[1], dtype=torch.float32)


@torch.library.custom_op("forge_accel::documents_backward", mutates_args=())
def _documents_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    ends: torch.Tensor,
    ends_k: torch.Tensor,
    window: int,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values, each of its tensor's shape."""
    like = query, key, value
    query, key, value = _as_read(query, key, value)
    samples = _samples(query, key, ends, ends_k, window)
    # Blocks of a window have keys in common; keys of a sample without queries are in no block.
    once = not window and sum(seen.stop - seen.start for _, seen, _, _ in samples) == key.shape[2]
    fresh = torch.empty_like if once else torch.zeros_like
    grads = fresh(like[0]), torch.empty_like(like[1]), torch.empty_like(like[2])
    of_heads = grads[0], fresh(key), fresh(value)
    for mine, seen, causal, mask in samples:
        dtype = _dtype_of(query, mine.stop - mine.start, _SHORT_BACKWARD)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, mine].transpose(1, 2).to(dtype),
            query[:, :, mine].to(dtype),
            key[:, :, seen].to(dtype),
            value[:, :, seen].to(dtype),
            out[:, mine].transpose(1, 2).to(dtype),
            sums[:, mine].transpose(1, 2),
            0.0,
            causal,
            attn_mask=None if mask is None else mask.to(dtype),
            scale=scaling,
        )
        for total, rows, part in zip(of_heads, (mine, seen, seen), found, strict=True):
            if once:
                total[:, :, rows] = part
            else:
                total[:, :, rows] += part
    for grad_k, of_each in zip(grads[1:], of_heads[1:], strict=True):
        torch.sum(of_each.unflatten(1, (grad_k.shape[1], -1)), 2, out=grad_k)
    return grads


@_documents_backward.register_fake
def _(
    grad: torch.Tensor,  # noqa: ARG001 - the signature of the operator
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,  # noqa: ARG001
    sums: torch.Tensor,  # noqa: ARG001
    ends: torch.Tensor,  # noqa: ARG001
    ends_k: torch.Tensor,  # noqa: ARG001
    window: int,  # noqa: ARG001
    scaling: float,  # noqa: ARG001
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    query, key, value, ends, ends_k, window, scaling = inputs
    ctx.save_for_backward(query, key, value, *output, ends, ends_k)
    ctx.numbers = window, scaling


def _backward(ctx: Any, grad: torch.Tensor, _sums: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = _documents_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.numbers)
    return (*grads, None, None, None, None)


_documents.register_autograd(_backward, setup_context=_save)


def _as_read(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values as torch's kernels read them.

    There is a key head for each query head, and channels lie side by side. That is made inside the
    operators, so that autograd keeps what there was before.
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    return [states if states.stride(3) == 1 else states.contiguous() for states in (query, key, value)]


def _samples(
    query: torch.Tensor, key: torch.Tensor, ends: torch.Tensor, ends_k: torch.Tensor, window: int
) -> list[tuple[slice, slice, bool, torch.Tensor | None]]:
    """Return each sample's queries, the keys that they see, and their mask.

    Samples longer than the window are cut into blocks of as many queries, so work and masks grow with length x window.
    """
    lengths = document_lengths(ends, query.shape[2])
    sizes = key_lengths(ends_k, key.shape[2], lengths)
    found = []
    for (start, stop), (first, last) in zip(_spans(lengths), _spans(sizes), strict=True):
        outgrown = 0 < window < last - first
        for begin in range(start, stop, window if outgrown else max(1, stop - start)):
            end = min(begin + window, stop) if outgrown else stop
            # The last query is at the last key.
            until = last - (stop - end)
            since = max(first, until - (end - begin) - window + 1) if outgrown else first
            queries, keys = end - begin, until - since
            causal = queries == keys
            added = None if causal else _added_mask(queries, keys, window or None, query.device)
            found.append((slice(begin, end), slice(since, until), causal, added))
    return found


def _added_mask(queries: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a mask float32 [1, 1, queries, keys] that is added to the scores."""
    mask = causal_mask(queries, keys, window, device)
    return torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))[None, None]


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return list(pairwise(ends))
