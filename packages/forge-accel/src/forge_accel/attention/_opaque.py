"""Document attention on a CPU as one operator, which `torch.compile` does not trace.

How many samples a row holds is in the values of a tensor, and a graph that depended on them would be one for each row.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch

from forge_accel.attention._causal import causal_mask, dtype_on_cpu
from forge_accel.attention._refusals import document_lengths, key_lengths
from forge_accel.attention._varlen import compute_dtype


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
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
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
    for mine, seen, causal, mask in _samples(query, key, ends, ends_k, window):
        dtype = dtype_on_cpu(query.dtype, mine.stop - mine.start)
        found, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query[:, :, mine].to(dtype),
            key[:, :, seen].to(dtype),
            value[:, :, seen].to(dtype),
            0.0,
            causal,
            attn_mask=mask,
            scale=scaling,
        )
        out[:, mine], sums[:, mine] = found.transpose(1, 2), logsumexp.transpose(1, 2)
    return out, sums


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
    grads = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
    for mine, seen, causal, mask in _samples(query, key, ends, ends_k, window):
        dtype = dtype_on_cpu(query.dtype, mine.stop - mine.start)
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad[:, mine].transpose(1, 2).to(dtype),
            query[:, :, mine].to(dtype),
            key[:, :, seen].to(dtype),
            value[:, :, seen].to(dtype),
            out[:, mine].transpose(1, 2).to(dtype),
            sums[:, mine].transpose(1, 2),
            0.0,
            causal,
            attn_mask=mask,
            scale=scaling,
        )
        for total, rows, part in zip(grads, (mine, seen, seen), found, strict=True):
            total[:, :, rows] = part
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


def _samples(
    query: torch.Tensor, key: torch.Tensor, ends: torch.Tensor, ends_k: torch.Tensor, window: int
) -> list[tuple[slice, slice, bool, torch.Tensor | None]]:
    """Return each sample's queries, its keys, and its mask: causal, or of its own."""
    lengths = document_lengths(ends, query.shape[2])
    sizes = key_lengths(ends_k, key.shape[2], lengths)
    found = []
    for (start, stop), (first, last) in zip(_spans(lengths), _spans(sizes), strict=True):
        queries, keys = stop - start, last - first
        if not queries:
            continue
        causal = queries == keys and not (window and keys > window)
        mask = None if causal else causal_mask(queries, keys, window or None, query.device)
        # The operator adds its mask to the scores.
        dtype = dtype_on_cpu(query.dtype, queries)
        added = None if mask is None else torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))
        found.append((slice(start, stop), slice(first, last), causal, None if added is None else added[None, None]))
    return found


def _spans(lengths: list[int]) -> list[tuple[int, int]]:
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return list(pairwise(ends))
