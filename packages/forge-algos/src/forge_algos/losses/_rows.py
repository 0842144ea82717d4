"""Logits of rows, a chunk at a time, and the gradients back to what they were computed from.

What a loss does with a chunk of logits is its own matter; this file computes the logits and collects their gradients, so that
[M, V] never exists. A source (`Projected`, `Given`) states how tensors become logits and holds none of them; its `start` begins
a pass over the chunks, which adds up gradients.
"""

from collections.abc import Sequence
from typing import Protocol

import attrs
import torch

from forge_algos.losses._numeric import wide
from forge_algos.losses._wide_sums import add_product, adds_wide, write_product

CHUNK_ROWS = 512
"""Measured with D=576, V=49k and 512 labelled rows on a 2-core AVX2 CPU:
64 rows 0.42 s, 128 0.31 s, 256 0.305 s, 512 0.29 s (full logits 0.38 s); they cost 2 kB × V. A large accelerator passes over
the weight's gradient [V, D] less often with more rows: `heads.score_rows_at_once`."""

Tensors = Sequence[torch.Tensor | None]
Needs = Sequence[bool]


class LogitPass(Protocol):
    """One pass over the chunks of M rows."""

    chunks: list[slice]
    needed: bool
    """Whether any of the tensors needs a gradient."""
    slope_dtype: torch.dtype | None
    """Dtype of slopes: narrower than the logits' where `backward` only multiplies matrices in it.
    A slope in the logits' dtype is taken too. None where no tensor needs a gradient."""

    def logits(self, rows: slice) -> torch.Tensor:
        """Compute float32[C, V] (float64 for float64) of one of `chunks`, to be overwritten.
        They are valid until the next chunk.
        """
        ...

    def backward(self, rows: slice, slope: torch.Tensor) -> None:
        """Take the loss's slope[C, V] with respect to the last logits; it is overwritten.
        It is in their dtype or in `slope_dtype`.
        """
        ...

    def gradients(self) -> Tensors:
        """Return a gradient for each tensor after the last chunk, None where none is needed."""
        ...


class LogitSource(Protocol):
    """Computation of logits from tensors."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which logits, and all that follows from them, are computed."""
        ...

    def start(self, tensors: Tensors, needs: Needs) -> LogitPass:
        """Begin a pass over these tensors, with gradients for those that need one."""
        ...


@attrs.frozen(kw_only=True)
class Projected:
    """Logits as cap(scale · (hidden @ weightᵀ + bias)) / temperature.
    Its tensors are hidden[M, D], weight[V, D], and bias[V] or None.
    """

    product: torch.dtype
    """Dtype of the matrix products, from `product_dtype`."""
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0
    chunk_rows: int = CHUNK_ROWS

    @property
    def dtype(self) -> torch.dtype:
        return wide(self.product)

    def start(self, tensors: Tensors, needs: Needs) -> LogitPass:
        return _ProjectedPass(self, tensors, needs)


@attrs.frozen(kw_only=True)
class Given:
    """Logits as given[M, V] / temperature, its one tensor."""

    given: torch.dtype
    temperature: float = 1.0
    chunk_rows: int = CHUNK_ROWS

    @property
    def dtype(self) -> torch.dtype:
        return wide(self.given)

    def start(self, tensors: Tensors, needs: Needs) -> LogitPass:
        return _GivenPass(self, tensors, needs)


def product_dtype(weight: torch.Tensor) -> torch.dtype:
    """Return the weight's dtype, or autocast's where that is on; float64 stays."""
    kind = weight.device.type
    if torch.is_autocast_enabled(kind) and weight.dtype != torch.float64:
        return torch.get_autocast_dtype(kind)
    return weight.dtype


def needs_of(tensors: Tensors) -> tuple[bool, ...]:
    """Return for each tensor whether it needs a gradient here and now."""
    enabled = torch.is_grad_enabled()
    return tuple(enabled and tensor is not None and tensor.requires_grad for tensor in tensors)


class _ProjectedPass:
    def __init__(self, source: Projected, tensors: Tensors, needs: Needs) -> None:
        hidden, weight, bias = tensors
        assert hidden is not None
        assert weight is not None
        need_hidden, need_weight, need_bias = needs
        self._source = source
        self.chunks = even_chunks(len(hidden), source.chunk_rows)
        self.needed = any(needs)
        self._weight_VD, self._hidden_MD = weight.detach().to(source.product), hidden.detach().to(source.product)
        self._bias = None if bias is None else bias.detach()
        most = max((rows.stop - rows.start for rows in self.chunks), default=0)
        self._buffer = self._hidden_MD.new_empty(most, len(weight), dtype=source.dtype)
        self._flat: torch.Tensor | None = None
        self._grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # The first chunk overwrites; filling [V, D] with zeros first would be one more pass over memory. Several chunks of a
        # weight in 16 bits are added up in float32 and rounded once.
        kept = wide(weight.dtype) if len(self.chunks) > 1 else weight.dtype
        empty = torch.empty_like if self.chunks else torch.zeros_like
        self._grad_weight = empty(weight, dtype=kept) if need_weight else None
        self._weight_dtype = weight.dtype
        self._grad_bias = torch.zeros_like(bias, dtype=source.dtype) if bias is not None and need_bias else None
        # A slope that is still multiplied or added up is rounded after that.
        as_it_is = source.softcap is None and source.scale / source.temperature == 1.0 and self._grad_bias is None
        self.slope_dtype = (source.product if as_it_is else source.dtype) if self.needed else None

    def logits(self, rows: slice) -> torch.Tensor:
        source, logits = self._source, self._buffer[: rows.stop - rows.start]
        if source.product == source.dtype:
            torch.mm(self._hidden_MD[rows], self._weight_VD.t(), out=logits)
        elif adds_wide(logits.device, source.product, source.dtype):
            write_product(logits, self._hidden_MD[rows], self._weight_VD.t())
        else:
            logits.copy_(self._hidden_MD[rows] @ self._weight_VD.t())
        if self._bias is not None:
            logits.add_(self._bias)
        if source.softcap is None:
            return _times(logits, source.scale / source.temperature)
        _times(logits, source.scale).div_(source.softcap).tanh_()
        self._flat = logits.square().neg_().add_(1) if self.needed else None
        return logits.mul_(source.softcap / source.temperature)

    def backward(self, rows: slice, slope: torch.Tensor) -> None:
        if self._flat is not None:
            slope.mul_(self._flat)
        _times(slope, self._source.scale / self._source.temperature)
        if self._grad_bias is not None:
            self._grad_bias.add_(slope.sum(0))
        slope, hidden_CD = slope.to(self._source.product), self._hidden_MD[rows]
        if self._grad_hidden is not None:
            self._grad_hidden[rows] = slope @ self._weight_VD
        first = rows.start == 0
        if self._grad_weight is not None and self._grad_weight.dtype == slope.dtype:
            self._grad_weight.addmm_(slope.t(), hidden_CD, beta=0 if first else 1)
        elif self._grad_weight is not None and adds_wide(slope.device, slope.dtype, self._grad_weight.dtype):
            add_product(self._grad_weight, slope.t(), hidden_CD, first=first)
        elif self._grad_weight is not None:
            product = slope.t() @ hidden_CD
            self._grad_weight.copy_(product) if first else self._grad_weight.add_(product)

    def gradients(self) -> Tensors:
        bias = self._grad_bias
        if bias is not None and self._bias is not None:
            bias = bias.to(self._bias.dtype)
        weight = None if self._grad_weight is None else self._grad_weight.to(self._weight_dtype)
        return self._grad_hidden, weight, bias


class _GivenPass:
    def __init__(self, source: Given, tensors: Tensors, needs: Needs) -> None:
        (given,) = tensors
        assert given is not None
        self._source = source
        self._given = given.detach()
        self.chunks = even_chunks(len(given), source.chunk_rows)
        self.needed = any(needs)
        self.slope_dtype = source.dtype if self.needed else None
        self._grad = torch.empty_like(given) if self.needed else None

    def logits(self, rows: slice) -> torch.Tensor:
        return _times(self._given[rows].to(self._source.dtype, copy=True), 1 / self._source.temperature)

    def backward(self, rows: slice, slope: torch.Tensor) -> None:
        if self._grad is not None:
            self._grad[rows] = _times(slope, 1 / self._source.temperature)

    def gradients(self) -> Tensors:
        return (self._grad,)


def _times(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place, or do nothing by a factor of 1."""
    return tensor if factor == 1.0 else tensor.mul_(factor)


def even_chunks(rows: int, at_most: int) -> list[slice]:
    """Divide `rows` into slices, as few and as even as `at_most` allows.
    So no chunk of one row follows a full one.
    """
    if rows == 0:
        return []
    size = -(-rows // -(-rows // at_most))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
