"""Checks of a call of document attention: what it would answer wrongly is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from forge_accel._errors import AttentionError

if TYPE_CHECKING:
    from collections.abc import Mapping

_UNSUPPORTED = {
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "output_attentions": "handing out attention weights (output_attentions)",
    "cache": "a paged cache",
}
"""Arguments of transformers' models that change the result, and that document attention does not implement."""


def refuse_unsupported(module: object, is_causal: bool | None, rest: Mapping[str, object]) -> None:
    """Refuse arguments that would silently be left out of the result.

    Raises:
        AttentionError: the model passes one that document attention does not implement.

    """
    for name, what in _UNSUPPORTED.items():
        if rest.get(name) is not None and rest[name] is not False:
            raise AttentionError(
                f"attention=documents does not compute {what}, which this model asks for: use attention=eager."
            )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if not causal:
        raise AttentionError("attention=documents is causal, and this layer is not (is_causal=False): use attention=eager.")


def check_shapes(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check that the shapes of queries, keys and values fit together.

    Raises:
        AttentionError: they are not [B, H, S, head] with H a multiple of the key heads, or there are fewer keys than queries.

    """
    fault = ""
    if not query.ndim == key.ndim == value.ndim == 4:
        fault = "attention needs [batch, heads, tokens, head size], not"
    elif key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[1] % key.shape[1]:
        fault = "these do not belong together:"
    elif key.shape[2] < query.shape[2]:
        fault = "there are fewer keys than queries:"
    if fault:
        # Only here: a compiled graph would be one for each shape that is written out.
        raise AttentionError(f"{fault} query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}.")


def check_packed(
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    kv_rows: torch.Tensor | None,
) -> None:
    """Check the arguments of a packed row, without reading the contents of a tensor.

    Reading them would make the host wait for a GPU.

    Raises:
        AttentionError: samples would not be kept apart, or would not attend to the keys that `kv_rows` names.

    """
    if attention_mask is not None:
        raise AttentionError(
            "a packed row (cu_seq_lens_q) came with an attention mask: the two contradict each other. Pass attention_mask=None."
        )
    more = key.shape[2] != query.shape[2]
    if more and (kv_rows is not None or cu_seqlens_k is None or cu_seqlens_k is cu_seqlens):
        raise AttentionError(
            f"a packed row (cu_seq_lens_q) met a KV cache: {query.shape[2]} queries, {key.shape[2]} keys. Pass use_cache=False."
        )
    if query.shape[0] != 1:
        raise AttentionError(f"a packed row is one row, but the batch has {query.shape[0]}: flatten it.")
    if cu_seqlens.ndim != 1 or cu_seqlens.is_floating_point() or len(cu_seqlens) < 1:
        raise AttentionError(
            f"cu_seq_lens_q must be integers of shape [documents + 1], not {cu_seqlens.dtype} {list(cu_seqlens.shape)}."
        )
    if kv_rows is not None:
        if kv_rows.ndim != 1 or kv_rows.dtype not in {torch.int32, torch.int64}:
            raise AttentionError(f"kv_rows must be int64 of shape [keys], not {kv_rows.dtype} {list(kv_rows.shape)}.")
        if cu_seqlens_k is None or cu_seqlens_k.shape != cu_seqlens.shape or cu_seqlens_k.is_floating_point():
            raise AttentionError(
                "kv_rows needs cu_seq_lens_k, which says where each sample ends in it: integers "
                f"{list(cu_seqlens.shape)}, as cu_seq_lens_q."
            )
    elif (
        not more
        and cu_seqlens_k is not None
        and cu_seqlens_k is not cu_seqlens
        and not torch.equal(cu_seqlens_k.to(cu_seqlens), cu_seqlens)
    ):
        raise AttentionError("cu_seq_lens_k differs from cu_seq_lens_q: without kv_rows documents attend to themselves only.")


def refuse_kv_rows(kv_rows: torch.Tensor | None) -> None:
    """Refuse shared keys in an ordinary call, where they would have no effect.

    Raises:
        AttentionError: `kv_rows` is given.

    """
    if kv_rows is not None:
        raise AttentionError(
            "kv_rows says whose keys the samples of a packed row see: pass cu_seq_lens_q too, which says where they end."
        )


def document_lengths(cu_seqlens: torch.Tensor, tokens: int) -> list[int]:
    """Convert the ends of the samples into their lengths.

    Raises:
        AttentionError: they do not cover the row from 0 to `tokens` in order.

    """
    ends = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(ends)]
    if ends[0] != 0 or ends[-1] != tokens or any(length < 0 for length in lengths):
        shown = ", ".join(map(str, ends[:4])) + (", ..." if len(ends) > 4 else "")
        raise AttentionError(f"cu_seq_lens_q must rise from 0 to the row's {tokens} tokens; it goes {shown} to {ends[-1]}.")
    return lengths


def key_lengths(ends_k: torch.Tensor | None, keys: int, lengths: list[int]) -> list[int]:
    """Convert the ends of the samples' keys into their numbers of keys.

    Raises:
        AttentionError: they do not cover the keys in order, or a sample has fewer keys than queries.

    """
    ends = [] if ends_k is None else ends_k.tolist()
    found = [end - start for start, end in pairwise(ends)]
    fit = len(found) == len(lengths) and all(seen >= own for own, seen in zip(lengths, found, strict=True))
    if not fit or ends[0] != 0 or ends[-1] != keys:
        raise AttentionError(
            f"cu_seq_lens_k must rise from 0 to the {keys} keys, and give each sample at least as many as it has queries."
        )
    return found


def check_positions(position_ids: object, queries: int, keys: int) -> None:
    """Check that an ordinary call without a mask needs none but the causal one.

    Args:
        position_ids: The model's own, int64 [B, S]; anything else is not checked.
        queries: S.
        keys: S' >= S; with a KV cache there are more keys than queries.

    Raises:
        AttentionError: positions restart or jump within a row, so samples are packed in it and would attend to each other; or
            there are keys beyond the last position, so the cache has room that is not filled yet.

    """
    if not isinstance(position_ids, torch.Tensor) or position_ids.ndim != 2 or position_ids.shape[1] != queries or not queries:
        return
    if queries > 1 and bool((position_ids.diff(dim=1) != 1).any()):
        raise AttentionError(
            "position_ids restart or jump within a row. If several samples are packed in it, pass cu_seq_lens_q, which says "
            "where they end; if the batch is padded, an attention mask must come along."
        )
    if keys > queries and int(position_ids[:, -1].min()) + 1 < keys:
        raise AttentionError(
            f"there are {keys} keys, but positions go to {int(position_ids[:, -1].min())} only: a KV cache of fixed size needs "
            "an attention mask. Use a cache that grows, or register a mask function that builds one."
        )
