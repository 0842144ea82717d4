"""Document attention: each sample of a packed row attends to itself alone.

It has transformers' attention signature, and is causal SDPA sample by sample: exact, no dense [T, T] mask, and the work of the
samples rather than of the row. Where a device has a kernel for variable lengths, one call of it does the same. Samples with a
common prompt may share it, once in the row: `kv_rows` names the positions whose keys and values each of them attends to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from forge_accel.attention._causal import causal_attention, sdpa
from forge_accel.attention._gather import check_rows, gather_rows, gathered_samples
from forge_accel.attention._opaque import opaque_attention
from forge_accel.attention._refusals import (
    check_packed,
    check_positions,
    check_shapes,
    document_lengths,
    key_lengths,
    refuse_kv_rows,
    refuse_unsupported,
)
from forge_accel.attention._varlen import compute_dtype, fits_kernel, varlen_attention

if TYPE_CHECKING:
    from collections.abc import Callable


def document_attention(
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
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    varlen_kernel: Callable[..., Any] | None = None,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attend causally, each sample of a packed row to itself alone, or to what `kv_rows` names.

    With `cu_seq_lens_q` the row is packed. Without, it is an ordinary call (generation, a plain batch): causal over the
    row, the last query at the last key, under `attention_mask` where there is one.

    Args:
        module: The attention layer; `is_causal` is read from it.
        query: [B, H, T, head], B = 1 where packed.
        key: [B, Hk, T', head]; H is a multiple of Hk; T' = T where packed, or more where `cu_seq_lens_k` says whose they are.
        value: [B, Hk, T', value head].
        attention_mask: Of an ordinary call: bool (True: attend) or additive, [B or 1, H or 1, T, T'], causality included.
        scaling: Factor of the scores; None is head ** -0.5.
        dropout: Probability of dropping an attention weight.
        sliding_window: Positions that a token attends to, its own included; None is all.
        is_causal: Overrides the layer's; False is refused.
        cu_seq_lens_q: Where the samples end: int32 [samples + 1], from 0 to T.
        cu_seq_lens_k: Where the samples end in `kv_rows`; without it where they end among the keys, if there are more keys than
            queries (a part of each sample's queries, with all keys that they see: the last query is at the last key); else the
            same as `cu_seq_lens_q`, or None.
        kv_rows: int64 [Tk], sample after sample: the positions whose keys and values it attends to, in their order; its last
            query is at its last key. None: its own.
        softcap: Cap of the scores, c · tanh(s / c) (Gemma 2); None: they have none.
        s_aux: Attention sinks [H] (gpt-oss): a score of each head beside those of the keys; None: there are none.
        varlen_kernel: Function with the signature of `torch.nn.attention.varlen.varlen_attn` as of torch 2.11, which
            computes the packed rows that it can: no dropout, cap or sinks, bfloat16 or float16, a head of at most 256. None:
            SDPA.
        rest: Further arguments of the model: `position_ids` are checked, `max_length_q` and `max_length_k` (ints) save the
            kernel a look at the device, what changes the result is refused.

    Returns:
        [B, T, H, value head], and None for the weights, which are never formed.

    Raises:
        AttentionError: the result would not be what was asked for.

    """
    refuse_unsupported(module, is_causal, rest)
    check_shapes(query, key, value)
    variant: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "softcap": softcap, "sinks": s_aux}
    if cu_seq_lens_q is None:
        refuse_kv_rows(kv_rows)
        if attention_mask is not None:
            # transformers has put causality, padding and the layer's window into the mask already.
            output = sdpa(query, key, value, mask=attention_mask, **variant)
        else:
            check_positions(rest.get("position_ids"), query.shape[2], key.shape[2])
            output = causal_attention(query, key, value, window=sliding_window, **variant)
        return output.transpose(1, 2).contiguous(), None
    check_packed(query, key, attention_mask, cu_seq_lens_q, cu_seq_lens_k, kv_rows)
    plain = not dropout and softcap is None and s_aux is None
    if varlen_kernel is not None and plain and fits_kernel(query, value):
        output = varlen_attention(
            varlen_kernel,
            query,
            key,
            value,
            cu_seq_lens_q,
            cu_seq_lens_k,
            kv_rows,
            max_length_q=rest.get("max_length_q"),
            max_length_k=rest.get("max_length_k"),
            window=sliding_window,
            scaling=scaling,
        )
        return output, None
    # As one operator: a graph does not depend on the number of samples, nor are copies of short ones kept for the backward.
    compiling = torch.compiler.is_compiling()
    opaque = compiling or compute_dtype(query) == torch.bfloat16
    if plain and opaque and query.device.type == "cpu" and value.shape[3] == query.shape[3]:
        if kv_rows is not None:
            if cu_seq_lens_k is not None and not compiling:
                check_rows(document_lengths(cu_seq_lens_q, query.shape[2]), cu_seq_lens_k, kv_rows, key.shape[2])
            key, value = gather_rows(key, kv_rows, dim=2), gather_rows(value, kv_rows, dim=2)
        ends_k = cu_seq_lens_k if kv_rows is not None or key.shape[2] != query.shape[2] else None
        return opaque_attention(query, key, value, cu_seq_lens_q, ends_k, window=sliding_window, scaling=scaling), None
    lengths = document_lengths(cu_seq_lens_q, query.shape[2])
    if not any(lengths):
        return value.new_zeros(1, 0, query.shape[1], value.shape[3]), None
    # Split, not sliced: the gradient of a slice is a tensor of the row's length, once for each sample.
    if kv_rows is None or cu_seq_lens_k is None:
        sizes = lengths if key.shape[2] == query.shape[2] else key_lengths(cu_seq_lens_k, key.shape[2], lengths)
        seen = zip(key.split(sizes, dim=2), value.split(sizes, dim=2), strict=True)
    else:
        seen = gathered_samples(key, value, lengths, cu_seq_lens_k, kv_rows)
    outputs = [
        causal_attention(q, k, v, window=sliding_window, **variant).transpose(1, 2)
        for q, (k, v) in zip(query.split(lengths, dim=2), seen, strict=True)
        if q.shape[2]
    ]
    return torch.cat(outputs, dim=1), None
