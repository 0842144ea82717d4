"""Shared keys: keys and values of a packed row → those that each sample attends to.

They are named by position (`kv_rows`), so that completions of one prompt can all attend to the prompt that is in the row once.
Samples that attend to their own positions and no others are cut out of the row; only the others are gathered.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from forge_accel._errors import AttentionError


def gather_rows(states: torch.Tensor, rows: torch.Tensor, dim: int) -> torch.Tensor:
    """Select rows int64 [Tk] along a dimension; gradients are summed in float32 or wider.

    A prompt's keys get a gradient from each of its completions; in bfloat16 each sum on the way would be rounded.
    """
    wide = torch.promote_types(states.dtype, torch.float32)
    return states.to(wide).index_select(dim, rows).to(states.dtype)


def check_rows(lengths: list[int], ends_k: torch.Tensor, kv_rows: torch.Tensor, tokens: int) -> list[int]:
    """Return how many keys each sample attends to; arguments as `gathered_samples`'.

    Raises:
        AttentionError: the ends or the positions do not fit the row, or a sample has fewer keys than queries.

    """
    bounds = ends_k.tolist()
    sizes = [stop - start for start, stop in pairwise(bounds)]
    if bounds[0] != 0 or bounds[-1] != len(kv_rows) or any(seen < own for own, seen in zip(lengths, sizes, strict=True)):
        raise AttentionError(
            f"cu_seq_lens_k must rise from 0 to the {len(kv_rows)} kv_rows, and give each sample at least as many as it has "
            "queries."
        )
    if len(kv_rows) and not 0 <= int(kv_rows.min()) <= int(kv_rows.max()) < tokens:
        raise AttentionError(
            f"kv_rows must name positions of the row's {tokens} tokens; they go from {int(kv_rows.min())} to "
            f"{int(kv_rows.max())}."
        )
    return sizes


def gathered_samples(
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: list[int],
    ends_k: torch.Tensor,
    kv_rows: torch.Tensor,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Select the keys and values that each sample attends to.

    Args:
        key: [1, Hk, T, head].
        value: [1, Hk, T, value head].
        lengths: Queries of each of n samples; T in all.
        ends_k: Where the samples end in `kv_rows`, integers [n + 1].
        kv_rows: int64 [Tk], positions in the row.

    Returns:
        For each sample, [1, Hk, keys, head] and [1, Hk, keys, value head].

    Raises:
        AttentionError: the ends or the positions do not fit the row, or a sample has fewer keys than queries.

    """
    # A GPU is waited for here, and no more often: what is gathered by lies on it already.
    tokens, on_host = key.shape[2], kv_rows.cpu().to(torch.int64)
    sizes = check_rows(lengths, ends_k, on_host, tokens)
    rows, positions = on_host.split(sizes), torch.arange(tokens).split(lengths)
    plain = [len(seen) == len(own) and torch.equal(seen, own) for seen, own in zip(rows, positions, strict=True)]
    found = zip(key.split(lengths, dim=2), value.split(lengths, dim=2), strict=True)
    if all(plain):
        return list(found)
    others = [seen for seen, is_plain in zip(kv_rows.to(key.device).split(sizes), plain, strict=True) if not is_plain]
    index, sizes = torch.cat(others), [len(seen) for seen in others]
    gathered = zip(*(gather_rows(states, index, dim=2).split(sizes, dim=2) for states in (key, value)), strict=True)
    return [own if is_plain else next(gathered) for own, is_plain in zip(found, plain, strict=True)]
