"""Log-probability of each target from hidden states and a head, without ever holding [T, V].

What is computed from the log-probabilities is not known here, so the backward pass computes each chunk's logits a second time:
between the passes there is one number a row, and no [M, V].
"""

from typing import Any, Literal

import torch
from torch.autograd.function import once_differentiable

from forge_algos.batches._packed import IGNORE
from forge_algos.losses import _check
from forge_algos.losses._nll import labelled
from forge_algos.losses._rows import CHUNK_ROWS, LogitSource, Needs, Projected, Tensors, needs_of, product_dtype


def token_logps(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    ignore_index: int | None = IGNORE,
    chunk_rows: int = CHUNK_ROWS,
) -> torch.Tensor:
    """Compute log softmax(logits / temperature)[target] of each row that has a target.

    Equals a gather from `torch.log_softmax` in value and gradients. The products run in the weight's dtype, or autocast's where
    that is on, the same in the backward pass; all that follows them is float32 (float64 where the weight is).

    Args:
        hidden: float[T, D], what the decoder gives.
        weight: float[V, D], the head; no gradient is computed for it where it needs none. Its values are read again in the
            backward pass.
        targets: int64[T], ids in [0, V), or `ignore_index`.
        bias: float[V].
        scale: multiplies the logits.
        softcap: logits become softcap · tanh(logits / softcap).
        temperature: above 0; divides the logits after all that.
        ignore_index: rows with this target are left out; None: every row has a target.
        chunk_rows: how many rows are scored at once, at most.

    Returns:
        torch.Tensor: float32[M], in nats, of the M rows with a target, in their order.

    Raises:
        LossError: a temperature that is not above 0, or targets that are not one a row.

    >>> h, w = torch.eye(3), torch.eye(3)
    >>> token_logps(h, w, torch.tensor([0, -100, 1]))
    tensor([-0.5514, -1.5514])
    """
    _check.number("temperature", temperature, above=0)
    _check.number("chunk_rows", chunk_rows, least=1)
    _check.targets(targets, hidden, "hidden")
    hidden, targets = labelled(hidden, targets, ignore_index)
    source = Projected(
        product=product_dtype(weight), scale=scale, softcap=softcap, temperature=temperature, chunk_rows=chunk_rows
    )
    return logps_of_rows(source, (hidden, weight, bias), targets)


def logps_of_rows(source: LogitSource, tensors: Tensors, targets: torch.Tensor) -> torch.Tensor:
    """Compute log p(target)[M] of rows that all have a target, from any source of logits."""
    logps, _ = _logps(source, tensors, targets, None)
    return logps


def logps_and_entropy_of_rows(
    source: LogitSource, tensors: Tensors, targets: torch.Tensor, *, learned: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same, and the entropy[M] of each row's distribution in nats.
    The entropy has a gradient where it is `learned`.
    """
    return _logps(source, tensors, targets, "learned entropy" if learned else "entropy")


def logps_and_collision_of_rows(
    source: LogitSource, tensors: Tensors, targets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the same, and log Σ p²[M] of each row's distribution: what two draws are equal by.
    It has no gradient.
    """
    return _logps(source, tensors, targets, "collision")


Beside = Literal["entropy", "learned entropy", "collision"] | None
"""What is computed of each row's distribution, beside the target's log-probability."""


def _logps(source: LogitSource, tensors: Tensors, targets: torch.Tensor, beside: Beside) -> tuple[torch.Tensor, torch.Tensor]:
    return _TokenLogps.apply(source, targets, needs_of(tensors), beside, *tensors)


class _TokenLogps(torch.autograd.Function):
    @staticmethod
    def forward(  # pyrefly: ignore[bad-override]  torch's own signature is *args
        ctx: Any, source: LogitSource, targets: torch.Tensor, needs: Needs, beside: Beside, *tensors: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logps = torch.empty(len(targets), dtype=source.dtype, device=targets.device)
        further = torch.empty_like(logps if beside else logps[:0])
        normaliser = torch.empty_like(logps)
        with torch.autocast(targets.device.type, enabled=False):
            logit_pass = source.start(tensors, [False] * len(tensors))
            for rows in logit_pass.chunks:
                logits = logit_pass.logits(rows)
                top = logits.amax(1, keepdim=True)
                logits.sub_(top)
                own = logits.gather(1, targets[rows, None])
                total = logits.exp_().sum(1, keepdim=True)
                logps[rows] = (own - total.log()).squeeze(1)
                normaliser[rows] = (total.log() + top).squeeze(1)
                if beside in ("entropy", "learned entropy"):
                    # entr(p) is 0 at p = 0, where p · log p is NaN.
                    further[rows] = torch.special.entr(logits.div_(total)).sum(1)
                elif beside == "collision":
                    # The largest is 1 before the division, so that their squares do not vanish.
                    further[rows] = (logits.square_().sum(1, keepdim=True).log() - 2 * total.log()).squeeze(1)
        ctx.learned = beside == "learned entropy"
        ctx.save_for_backward(targets, normaliser, further if ctx.learned else None, *tensors)
        ctx.source, ctx.needs = source, needs
        if not ctx.learned:
            ctx.mark_non_differentiable(further)
        return logps, further

    @staticmethod
    @once_differentiable
    def backward(  # pyrefly: ignore[bad-override]  the decorator hides the names
        ctx: Any, *grad_outputs: Any
    ) -> tuple[torch.Tensor | None, ...]:
        upstream = grad_outputs[0][:, None]
        targets, normaliser, entropy, *tensors = ctx.saved_tensors
        with torch.autocast(targets.device.type, enabled=False):
            logit_pass = ctx.source.start(tensors, ctx.needs)
            for rows in logit_pass.chunks:
                slope = logit_pass.logits(rows).sub_(normaliser[rows, None])
                if ctx.learned:
                    # Of H by a logit: -p(log p + H); p is 0 where log p is -inf.
                    by_entropy = (slope + entropy[rows, None]).mul_(grad_outputs[1][rows, None])
                    probability = slope.exp_()
                    further = torch.where(probability > 0, by_entropy, 0).mul_(probability)
                    slope = probability.mul_(-upstream[rows]).sub_(further)
                else:
                    slope = slope.exp_().mul_(-upstream[rows])
                logit_pass.backward(rows, slope.scatter_add_(1, targets[rows, None], upstream[rows]))
            return (None, None, None, None, *logit_pass.gradients())
