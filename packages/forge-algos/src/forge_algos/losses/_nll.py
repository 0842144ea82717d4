"""Hidden states, a head and targets → the summed negative log-likelihood, without ever holding [T, V].

Only rows that have a target are scored, `chunk_rows` at a time. A chunk's gradient needs nothing but its own logits, so it
is computed while they are there, in the forward pass; the backward pass only multiplies by the upstream gradient.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from forge_algos._batch import IGNORE
from forge_algos.losses._terms import LossTerms

CHUNK_ROWS = 512
"""Measured with D=576, V=49k and 512 labelled rows on a 2-core AVX2 CPU: 64 rows 0.42 s, 128 0.31 s, 256 0.305 s, 512 0.29 s
(full logits 0.38 s). 512 rows are also enough for a large accelerator's matrix units, and cost 2 kB × V."""


def nll(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int | None = IGNORE,
    chunk_rows: int = CHUNK_ROWS,
) -> LossTerms:
    """-log softmax(logits)[target], summed over the rows that have a target; logits = cap(scale · (hidden @ weightᵀ + bias)).

    Equals `torch.nn.functional.cross_entropy(..., reduction="sum")` in value and gradients for any upstream gradient. The
    products run in the weight's dtype, or autocast's where that is on; all that follows them is float32 (float64 where the
    weight is). The gradients are released by the backward pass, so that it can run once.

    Args:
        hidden: float[T, D], what the decoder gives.
        weight: float[V, D], the head; no gradient is computed for it where it needs none.
        targets: int64[T], ids in [0, V), or `ignore_index`.
        bias: float[V].
        scale: multiplies the logits (Granite divides by `logits_scaling`, Cohere multiplies by `logit_scale`).
        softcap: logits become softcap · tanh(logits / softcap), as in Gemma 2.
        ignore_index: rows with this target are left out. None says that every row has a target: nothing is looked up, so
            nothing waits for the device.
        chunk_rows: how many rows are scored at once, at most.

    Returns:
        LossTerms: the sum in nats, and the number of scored rows.

    >>> h, w = torch.eye(3), torch.eye(3)
    >>> terms = nll(h, w, torch.tensor([0, -100, 2]))
    >>> round(terms.sum.item(), 4), terms.count
    (1.1029, 2)
    """
    if ignore_index is not None:
        rows = (targets != ignore_index).nonzero().squeeze(1)
        if len(rows) < len(targets):
            hidden, targets = hidden.index_select(0, rows), targets.index_select(0, rows)
    grad_enabled = torch.is_grad_enabled()
    needs = tuple(grad_enabled and t is not None and t.requires_grad for t in (hidden, weight, bias))
    loss = _ChunkedNLL.apply(hidden, weight, bias, targets, scale, softcap, chunk_rows, needs)
    return LossTerms(loss, len(targets))


def nll_of_logits(logits: torch.Tensor, targets: torch.Tensor, *, chunk_rows: int = CHUNK_ROWS) -> LossTerms:
    """The same from logits[M, V] that a model has computed its own way; every row has a target. Float32, in chunks."""
    needed = torch.is_grad_enabled() and logits.requires_grad
    return LossTerms(_LogitsNLL.apply(logits, targets, chunk_rows, needed), len(targets))


class _ChunkedNLL(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        targets: torch.Tensor,
        scale: float,
        softcap: float | None,
        chunk_rows: int,
        needs: tuple[bool, bool, bool],
    ) -> torch.Tensor:
        kind = hidden.device.type
        dtype = weight.dtype
        if torch.is_autocast_enabled(kind) and dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
        # Autocast would wrap each product below in casts of its own.
        with torch.autocast(kind, enabled=False):
            ctx.grads, losses = _chunked(hidden, weight, bias, targets, scale, softcap, chunk_rows, needs, dtype)
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]  the decorator hides the names
        ctx: Any, *grad_outputs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        return (*_scaled(grads, *grad_outputs), None, None, None, None, None)


class _LogitsNLL(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, logits: torch.Tensor, targets: torch.Tensor, chunk_rows: int, needed: bool
    ) -> torch.Tensor:
        grad = torch.empty_like(logits) if needed else None
        losses = []
        for rows in _chunks(len(targets), chunk_rows):
            chunk = logits[rows].to(_wide(logits.dtype), copy=True)
            losses.append(_losses_then_residual(chunk, targets[rows], residual=needed))
            if grad is not None:
                grad[rows] = chunk
        ctx.grads = (grad,)
        return torch.cat(losses).sum() if losses else logits.new_zeros((), dtype=_wide(logits.dtype))

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]  the decorator hides the names
        ctx: Any, *grad_outputs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        grads, ctx.grads = ctx.grads, None
        return (*_scaled(grads, *grad_outputs), None, None, None)


def _scaled(grads: tuple[torch.Tensor | None, ...] | None, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    if grads is None:
        raise RuntimeError("nll gives its gradients once, to save memory; run the forward again before a second backward")
    return tuple(None if g is None else g.mul_(upstream) for g in grads)


def _chunked(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    targets: torch.Tensor,
    scale: float,
    softcap: float | None,
    chunk_rows: int,
    needs: tuple[bool, bool, bool],
    dtype: torch.dtype,
) -> tuple[tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None], torch.Tensor]:
    """((grad of hidden[M, D], of weight[V, D], of bias[V]), losses[M]); the products run in `dtype`."""
    need_hidden, need_weight, need_bias = needs
    wide = _wide(dtype)
    chunks = _chunks(len(targets), chunk_rows)
    w_VD = weight.detach().to(dtype)
    h_MD = hidden.detach().to(dtype)
    losses = h_MD.new_empty(len(targets), dtype=wide)
    grad_hidden = torch.empty_like(hidden) if need_hidden else None
    # The first chunk overwrites; filling [V, D] with zeros first would be one more pass over memory.
    grad_weight = (torch.empty_like if chunks else torch.zeros_like)(weight) if need_weight else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and need_bias else None
    most = max((rows.stop - rows.start for rows in chunks), default=0)
    buffer = h_MD.new_empty(most, len(w_VD), dtype=wide)
    for rows in chunks:
        h_CD, logits = h_MD[rows], buffer[: rows.stop - rows.start]
        if dtype == wide:
            torch.mm(h_CD, w_VD.t(), out=logits)
        else:
            logits.copy_(h_CD @ w_VD.t())
        if bias is not None:
            logits.add_(bias.detach())
        if scale != 1.0:
            logits.mul_(scale)
        slope = None
        if softcap is not None:
            slope = logits.div_(softcap).tanh_().square().neg_().add_(1)
            logits.mul_(softcap)
        losses[rows] = _losses_then_residual(logits, targets[rows], residual=any(needs))
        if not any(needs):
            continue
        if slope is not None:
            logits.mul_(slope)
        if scale != 1.0:
            logits.mul_(scale)
        if grad_bias is not None:
            grad_bias.add_(logits.sum(0))
        residual = logits.to(dtype)
        if grad_hidden is not None:
            grad_hidden[rows] = residual @ w_VD
        first = rows.start == 0
        if grad_weight is not None and grad_weight.dtype == dtype:
            grad_weight.addmm_(residual.t(), h_CD, beta=0 if first else 1)
        elif grad_weight is not None:
            product = residual.t() @ h_CD
            grad_weight.copy_(product) if first else grad_weight.add_(product)
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return (grad_hidden, grad_weight, grad_bias), losses


def _losses_then_residual(logits: torch.Tensor, targets: torch.Tensor, *, residual: bool) -> torch.Tensor:
    """-log softmax(logits)[target] of each row; `logits`[C, V] is overwritten, with softmax - onehot if `residual`."""
    logits.sub_(logits.amax(1, keepdim=True))
    own = logits.gather(1, targets[:, None])
    total = logits.exp_().sum(1, keepdim=True)
    if residual:
        logits.div_(total)
        logits.scatter_add_(1, targets[:, None], torch.full_like(own, -1.0))
    return (total.log() - own).squeeze(1)


def _chunks(rows: int, at_most: int) -> list[slice]:
    """Slices over `rows`, as few and as even as `at_most` allows: no chunk of one row after a full one."""
    if rows == 0:
        return []
    size = -(-rows // -(-rows // at_most))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
