"""Products of 16-bit matrices in float32, by one kernel where the device has it.

Otherwise a product is rounded to 16 bits, written, and read again to be widened or added: for the logits of a head and its
gradient [V, D] that is several passes over the largest matrices of a step, once a chunk.
"""

from functools import lru_cache

import torch


def adds_wide(device: torch.device, dtype: torch.dtype, into: torch.dtype) -> bool:
    """Return whether the device has `add_product` and `write_product` for a dtype; tried once.

    They are calls like any others of torch, which refuses an `out_dtype` wherever it has no kernel for that.
    """
    # Tensors without numbers, as of a memory plan, are of another type, and show nothing of the device.
    return _adds(str(device), dtype, into, type(torch.empty(0, device=device)) is torch.Tensor)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool) -> None:
    """Add left[V, C] @ right[C, D] in 16 bits to total[V, D], unrounded; the `first` overwrites."""
    _add_product(total, left, right, first)


def write_product(into: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Write left[C, D] @ right[D, V] in 16 bits into[C, V], unrounded."""
    torch.mm(left, right, out_dtype=into.dtype, out=into)


@torch.library.custom_op("forge_algos::add_product", mutates_args={"total"})
def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    torch.addmm(total, left, right, out_dtype=total.dtype, beta=0 if first else 1, out=total)


@_add_product.register_fake
def _(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, first: bool) -> None:
    # torch 2.11 cannot compute the shapes of its own call; nothing is allocated in it.
    del total, left, right, first


@lru_cache(maxsize=16)
def _adds(device: str, dtype: torch.dtype, into: torch.dtype, real: bool) -> bool:
    # 1 + 2⁻¹² has a digit more than the 16-bit dtypes.
    left = torch.eye(16, device=device, dtype=dtype)
    total = torch.full((16, 16), 2.0**-12, device=device, dtype=into)
    try:
        write_product(torch.empty_like(total), left, left)
        add_product(total, left, left, first=False)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return not real or torch.equal(total, torch.eye(16, device=device, dtype=into) + 2.0**-12)
