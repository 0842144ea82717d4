"""Products of 16-bit matrices added to a float32 sum, by one kernel where the device has it.

Otherwise a product is rounded to 16 bits, written, read and added: for the gradient [V, D] of a head that is several passes
over the largest matrix of a step, once a chunk.
"""

from functools import lru_cache

import torch


def adds_wide(device: torch.device, dtype: torch.dtype, into: torch.dtype) -> bool:
    """Return whether `add_product` works for matrices of `dtype` on the device; tried once.

    It is a call like any other of `torch.addmm`, which refuses an `out_dtype` wherever it has no kernel for that.
    """
    # Tensors without numbers, as of a memory plan, are of another type, and show nothing of the device.
    return _adds(str(device), dtype, into, type(torch.empty(0, device=device)) is torch.Tensor)


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, first: bool) -> None:
    """Add left[V, C] @ right[C, D] in 16 bits to total[V, D], unrounded; the `first` overwrites."""
    torch.addmm(total, left, right, out_dtype=total.dtype, beta=0 if first else 1, out=total)


@lru_cache(maxsize=16)
def _adds(device: str, dtype: torch.dtype, into: torch.dtype, real: bool) -> bool:
    # 1 + 2⁻¹² has a digit more than the 16-bit dtypes.
    left = torch.eye(16, device=device, dtype=dtype)
    total = torch.full((16, 16), 2.0**-12, device=device, dtype=into)
    try:
        add_product(total, left, left, first=False)
    except (RuntimeError, TypeError, NotImplementedError):
        return False
    return not real or torch.equal(total, torch.eye(16, device=device, dtype=into) + 2.0**-12)
