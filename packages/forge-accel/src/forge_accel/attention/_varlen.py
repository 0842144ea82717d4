"""torch's variable-length attention: one flash kernel for all samples of a packed row."""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from forge_accel.attention._gather import gather_rows

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_HEAD = 256
"""The largest head size of the flash kernels."""


def find_kernel() -> Callable[..., Any] | None:
    """Find torch's variable-length kernel; None where torch has none with window and scale.

    Those came with torch 2.11.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if {"window_size", "scale"} <= set(inspect.signature(varlen_attn).parameters) else None


def with_grouped_heads(kernel: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return the kernel with an argument `enable_gqa` that works on the device.

    Tried on a tiny row, forward and backward: a kernel may take fewer key heads than query heads without an argument for it
    (torch 2.11), or have the argument and no code for this chip. Where it takes none, keys and values are repeated before the
    call. A kernel that cannot be tried here is returned as it is.
    """
    named = "enable_gqa" in inspect.signature(kernel).parameters

    def repeated(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any, enable_gqa: bool = False, **how: Any
    ) -> Any:
        if enable_gqa:
            key, value = (states.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for states in (key, value))
        return kernel(query, key, value, *rest, **how)

    def unnamed(*states: Any, enable_gqa: bool = False, **how: Any) -> Any:  # noqa: ARG001 - it sees the heads itself
        return kernel(*states, **how)

    expected = _tried(repeated, device)
    if expected is None:
        return kernel
    for way in (kernel, unnamed) if named else (unnamed,):
        found = _tried(way, device)
        if found is not None and all(torch.allclose(a, b, atol=0.05) for a, b in zip(found, expected, strict=True)):
            return way
    return repeated


def _tried(kernel: Callable[..., Any], device: torch.device) -> list[torch.Tensor] | None:
    """Return output and gradients of a tiny row with two query heads a key head, or None."""
    ends = torch.tensor([0, 3, 8], dtype=torch.int32)
    shapes = ((8, 2, 64), (8, 1, 64), (8, 1, 64))
    values = (torch.linspace(-1, 1, 8 * heads * 64).sin().view(8, heads, 64) for _, heads, _ in shapes)
    try:
        with torch.enable_grad(), torch.amp.autocast(device.type, enabled=False):
            states = [value.to(device, torch.bfloat16).requires_grad_() for value in values]
            ends = ends.to(device)
            output = kernel(*states, ends, ends, 5, 5, scale=None, window_size=(-1, 0), enable_gqa=True)
            return [
                output.detach().float(),
                *(grad.float() for grad in torch.autograd.grad(output.float().square().sum(), states)),
            ]
    except (RuntimeError, TypeError, ValueError, AssertionError, NotImplementedError):
        return None


def fits_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """Decide whether the kernel can compute a packed row: dtype, head size, at least one token."""
    head, dtype = query.shape[3], compute_dtype(query)
    fits = head == value.shape[3] and head <= MAX_HEAD and head % 8 == 0
    return fits and dtype in {torch.bfloat16, torch.float16} and query.shape[2] > 0


def varlen_attention(
    kernel: Callable[..., Any],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    kv_rows: torch.Tensor | None,
    *,
    max_length_q: int | None,
    max_length_k: int | None,
    window: int | None,
    scaling: float | None,
) -> torch.Tensor:
    """Compute document attention of a packed row by one call of `kernel`.

    Args:
        kernel: Function with the signature of `varlen_attn` as of torch 2.11 or later.
        query: [1, H, T, head].
        key: [1, Hk, T', head].
        value: [1, Hk, T', head].
        cu_seqlens: Where the samples end, integers [samples + 1].
        cu_seqlens_k: Where they end in `kv_rows`, or among the keys where there are more of them than queries; else not read.
        kv_rows: int64 [Tk], the positions whose keys and values each sample attends to; None: its own.
        max_length_q: The most queries of a sample; None where it has to be read from the ends.
        max_length_k: The most keys of a sample; None likewise.
        window: Positions that a token attends to, its own included; None is all.
        scaling: Factor of the scores; None is head ** -0.5.

    Returns:
        [1, T, H, head].

    """
    dtype = compute_dtype(query)
    query, key, value = (states.squeeze(0).transpose(0, 1).to(dtype) for states in (query, key, value))
    ends = ends_k = cu_seqlens.to(device=query.device, dtype=torch.int32)
    most = most_k = _longest(max_length_q, ends)
    if cu_seqlens_k is not None and (kv_rows is not None or len(key) != len(query)):
        if kv_rows is not None:
            key, value = gather_rows(key, kv_rows, dim=0), gather_rows(value, kv_rows, dim=0)
        ends_k = cu_seqlens_k.to(device=query.device, dtype=torch.int32)
        most_k = _longest(max_length_k, ends_k)
    heads = query.shape[1] // key.shape[1]
    options: dict[str, Any] = {}
    if _groups_heads(kernel):
        options["enable_gqa"] = heads > 1
    elif heads > 1:
        key, value = key.repeat_interleave(heads, dim=1), value.repeat_interleave(heads, dim=1)
    # The kernel's window counts the positions before one's own; transformers' counts one's own too. A window that no sample
    # outgrows is left out, because the kernel has a causal path of its own.
    behind = window - 1 if window is not None and window < most_k else -1
    output = kernel(query, key, value, ends, ends_k, most, most_k, scale=scaling, window_size=(behind, 0), **options)
    return output.unsqueeze(0)


@lru_cache(maxsize=4)
def _groups_heads(kernel: Callable[..., Any]) -> bool:
    """Whether the kernel takes fewer key heads than query heads (torch 2.13)."""
    return "enable_gqa" in inspect.signature(kernel).parameters


def _longest(given: int | None, ends: torch.Tensor) -> int:
    return int(ends.diff().max()) if given is None else int(given)


def compute_dtype(query: torch.Tensor) -> torch.dtype:
    """Find the dtype that SDPA would compute in.

    Autocast casts SDPA's arguments but not the kernel's, and a float32 norm on queries and keys (Qwen3) leaves them wider
    than the values.
    """
    kind = query.device.type
    # torch.compile cannot trace the first question (torch 2.11); what it compiles for has autocast.
    known = torch.compiler.is_compiling() or torch.amp.is_autocast_available(kind)
    return torch.get_autocast_dtype(kind) if known and torch.is_autocast_enabled(kind) else query.dtype
