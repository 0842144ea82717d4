"""Matrix products in bfloat16 on a CPU → what each takes for itself, measured by its shape.

oneDNN, which computes them for torch, copies parts of the factors into blocks that fit a processor's instructions and caches.
How large these are depends on the processor, its threads, and the factors' shapes and order; torch's allocator gives them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forge_accel._dtypes import bfloat16
from forge_accel.devices._memory import ProfilerMeter

_WIDEST = 2048
"""Length beyond which a side of a factor changes little: blocks are shorter."""
_DEEPEST = 4
"""Products of a batch beyond which more change nothing: they are computed one by one by each thread."""

_Key = tuple[int, tuple[int, ...], bool, tuple[int, ...], bool]
_measured: dict[_Key, int] = {}


def product_scratch(products: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[int]:
    """Measure the bytes that products take and give back, each shape once in a process.

    Those in float32 take nothing of the allocator of torch: 0, as in all other dtypes.

    Args:
        products: the two factors of each, of whose tensors only shape, strides and dtype are read.
    """
    # torch has one profiler at a time: who uses it themselves gets no plan of this part.
    if torch.autograd._profiler_enabled():
        return [0] * len(products)
    return [_scratch(_key(*factors)) if factors[0].dtype == bfloat16 else 0 for factors in products]


def _key(first: torch.Tensor, second: torch.Tensor) -> _Key:
    def size(factor: torch.Tensor) -> tuple[int, ...]:
        *batch, rows, columns = factor.shape
        return (*(min(each, _DEEPEST) for each in batch), min(rows, _WIDEST), min(columns, _WIDEST))

    return torch.get_num_threads(), size(first), _is_turned(first), size(second), _is_turned(second)


def _is_turned(factor: torch.Tensor) -> bool:
    """Return whether a factor lies in memory column by column."""
    return factor.stride(-1) != 1 and factor.stride(-2) == 1


def _scratch(key: _Key) -> int:
    if key not in _measured:
        _, first, first_turned, second, second_turned = key
        factors = _made(first, turned=first_turned), _made(second, turned=second_turned)
        meter = ProfilerMeter()
        with torch.autocast("cpu", enabled=False), torch.inference_mode():
            meter.start(0)
            product = torch.matmul(*factors)
            most = meter.stop()
        _measured[key] = most - product.untyped_storage().nbytes()
    return _measured[key]


def _made(shape: tuple[int, ...], *, turned: bool) -> torch.Tensor:
    if not turned:
        return torch.zeros(shape, dtype=bfloat16)
    return torch.zeros((*shape[:-2], shape[-1], shape[-2]), dtype=bfloat16).transpose(-1, -2)
