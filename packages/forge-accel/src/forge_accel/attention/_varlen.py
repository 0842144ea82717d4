"""A packed row on a CUDA device → `torch.nn.attention.varlen.varlen_attn`, one flash kernel for all samples.

Whatever the kernel cannot do (float32, dropout, a head of more than 256, an ordinary call) goes to `document_attention`.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from forge_accel.attention._documents import document_attention
from forge_accel.attention._gather import gather_rows
from forge_accel.attention._refusals import check_heads, check_packed, refuse_unsupported

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HEAD = 256
"""The largest head size of the flash kernels."""


def find_kernel() -> Callable[..., Any] | None:
    """Find torch's variable-length kernel; None where this torch has none, or one without window and scale (before 2.11)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "scale"} <= set(inspect.signature(varlen_attn).parameters) else None


def with_kernel(kernel: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, None]]:
    """Make document attention that hands packed rows to `kernel`.

    Args:
        kernel: With the signature of `varlen_attn` as of torch 2.11 or later.

    Returns:
        A function with the signature and the contract of `document_attention`; `max_length_q` and `max_length_k` (ints) save
        it a look at the device.

    """
    groups_heads = "enable_gqa" in inspect.signature(kernel).parameters

    def varlen_document_attention(
        module: object,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        scaling: float | None = None,
        dropout: float = 0.0,
        *,
        sliding_window: int | None = None,
        is_causal: bool | None = None,
        cu_seq_lens_q: torch.Tensor | None = None,
        cu_seq_lens_k: torch.Tensor | None = None,
        kv_rows: torch.Tensor | None = None,
        **rest: Any,
    ) -> tuple[torch.Tensor, None]:
        cast = _cast_for(query)
        if cu_seq_lens_q is None or dropout or not query.shape[2] or not _fits(query, value, cast):
            return document_attention(
                module,
                query,
                key,
                value,
                attention_mask,
                scaling,
                dropout,
                sliding_window=sliding_window,
                is_causal=is_causal,
                cu_seq_lens_q=cu_seq_lens_q,
                cu_seq_lens_k=cu_seq_lens_k,
                kv_rows=kv_rows,
                **rest,
            )
        refuse_unsupported(module, is_causal, rest)
        check_heads(query, key, value)
        check_packed(query, key, attention_mask, cu_seq_lens_q, cu_seq_lens_k, kv_rows)
        query, key, value = (states[0].transpose(0, 1).to(cast) for states in (query, key, value))
        ends = ends_k = cu_seq_lens_q.to(device=query.device, dtype=torch.int32)
        longest = longest_k = _longest(rest.get("max_length_q"), ends)
        if kv_rows is not None and cu_seq_lens_k is not None:
            key, value = gather_rows(key, kv_rows, dim=0), gather_rows(value, kv_rows, dim=0)
            ends_k = cu_seq_lens_k.to(device=query.device, dtype=torch.int32)
            longest_k = _longest(rest.get("max_length_k"), ends_k)
        heads = query.shape[1] // key.shape[1]
        if heads > 1 and not groups_heads:
            key, value = key.repeat_interleave(heads, dim=1), value.repeat_interleave(heads, dim=1)
        # The kernel's window counts the positions before one's own; transformers' counts one's own too. A window that no
        # sample outgrows is left out, because the kernel has a causal path of its own.
        behind = sliding_window - 1 if sliding_window is not None and sliding_window < longest_k else -1
        output = kernel(
            query,
            key,
            value,
            ends,
            ends_k,
            longest,
            longest_k,
            scale=scaling,
            window_size=(behind, 0),
            **({"enable_gqa": heads > 1} if groups_heads else {}),
        )
        return output.unsqueeze(0), None

    return varlen_document_attention


def _longest(said: Any, ends: torch.Tensor) -> int:
    return int(ends.diff().max()) if said is None else int(said)


def _cast_for(query: torch.Tensor) -> torch.dtype:
    """Find the dtype to compute in. Autocast casts SDPA's arguments but not the kernel's, and a float32 norm on queries and
    keys (Qwen3) leaves them wider than the values.
    """
    kind = query.device.type
    autocast = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if autocast else query.dtype


def _fits(query: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> bool:
    head = query.shape[3]
    return dtype in {torch.bfloat16, torch.float16} and head == value.shape[3] and head <= MAX_HEAD and head % 8 == 0
