"""Steps of packed rows → a trained model, one `StepOutput` a step.

The one loop. It is a generator: logging, evaluating, saving and stopping are the body of the caller's `for` loop.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import attrs
import torch
from torch import nn

from forge_algos._batch import sample_count, token_count
from forge_algos._errors import DivergedError
from forge_algos._guard import guard_packed
from forge_algos._modules import mode
from forge_algos.losses import LossTerms
from forge_algos.objectives import Objective


@attrs.frozen(kw_only=True)
class StepOutput:
    """What one optimizer step did."""

    step: int
    """Counted from 1."""
    loss: float
    """Mean over the global batch's learned tokens, in nats, before the step; 0 where nothing was learned."""
    loss_tokens: int
    """Learned tokens of the global batch."""
    tokens: int
    """All its tokens."""
    samples: int
    """Its documents."""
    grad_norm: float
    """Global norm of the gradients before clipping."""
    learning_rate: float
    """The rate that this step used."""
    seconds: float
    """From asking for the batches to the optimizer's move; the caller's own work between steps is not in it."""


def train(
    model: nn.Module,
    steps: Iterable[Sequence[Any]],
    *,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    max_grad_norm: float = 1.0,
    device: torch.device | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[StepOutput]:
    """Take one optimizer step for each element of `steps`.

    A step's loss is the sum over its micro-batches divided by the learned tokens of all of them, counted before the first
    forward: the gradients do not depend on how the step is cut. Micro-batches with nothing to learn (empty ones too) are
    skipped. A step with nothing to learn moves no weight and no optimizer state, only the schedule; its `loss_tokens` is 0.

    Gradients stay on the parameters until the next step begins. The host waits for the device once a step. Guards against
    packed rows with a cache or a mask while it runs; the end, or closing the generator, restores the modules' modes.

    Args:
        model: on `device`, whose trainable parameters `optimizer` holds.
        steps: for each step its micro-batches, `PackedBatch` shaped.
        objective: what is learned; `SFT()`.
        optimizer: moved once a step.
        scheduler: stepped once a step.
        max_grad_norm: gradients are scaled down to this global norm; 0 turns clipping off.
        device: where batches go; the model's by default.
        autocast: makes the context that forwards run in, for instance `partial(torch.autocast, "cpu", torch.bfloat16)`.

    Yields:
        StepOutput: after each step.

    Raises:
        DivergedError: the loss or the gradient norm is NaN or infinite; the optimizer has not moved.
        PackedBatchError: a batch is malformed, or a forward would mix documents.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = next(model.parameters()).device if device is None else device
    with mode(model, training=True), guard_packed(model):
        terms_of = objective.bind(model, device=device)
        started = time.perf_counter()
        for step, micro_batches in enumerate(steps, start=1):
            if not model.training:
                # The caller's own work between two steps may have left it in evaluation mode.
                model.train()
            learning_rate = float(optimizer.param_groups[0]["lr"])
            counts = [objective.count(batch) for batch in micro_batches]
            optimizer.zero_grad(set_to_none=True)
            work = [batch for batch, count in zip(micro_batches, counts, strict=True) if count]
            loss = grad_norm = 0.0
            if work:
                sums = _accumulate(work, terms_of, sum(counts), autocast)
                norm = _norm(parameters)
                loss, grad_norm = _finite(step, sums, norm, sum(counts))
                # Torch's clipping passes over every gradient, to multiply by 1 where there is nothing to clip.
                if max_grad_norm and grad_norm + 1e-6 > max_grad_norm:
                    torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
                optimizer.step()
            _advance(scheduler, moved=bool(work))
            yield StepOutput(
                step=step,
                loss=loss,
                loss_tokens=sum(counts),
                tokens=sum(token_count(batch) for batch in micro_batches),
                samples=sum(sample_count(batch) for batch in micro_batches),
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                seconds=time.perf_counter() - started,
            )
            started = time.perf_counter()


def _accumulate(
    micro_batches: Sequence[Any],
    terms_of: Callable[[Any], LossTerms],
    count: int,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> list[torch.Tensor]:
    """Gradients of the sum divided by `count`, added up over the micro-batches; returns their sums, not yet waited for."""
    sums = []
    for batch in micro_batches:
        with autocast():
            terms = terms_of(batch)
        (terms.sum / count).backward()
        sums.append(terms.sum.detach())
    return sums


def _finite(step: int, sums: list[torch.Tensor], norm: torch.Tensor, count: int) -> tuple[float, float]:
    """(loss, gradient norm): the step's one wait for the device, before the optimizer moves."""
    *totals, grad_norm = torch.stack([*(s.float() for s in sums), norm]).tolist()
    loss = math.fsum(totals) / count if all(map(math.isfinite, totals)) else sum(totals)
    if not math.isfinite(loss) or not math.isfinite(grad_norm):
        what = f"the loss is {loss}" if not math.isfinite(loss) else f"the gradient norm is {grad_norm} (loss {loss:.4g})"
        raise DivergedError(
            f"step {step}: {what}. The optimizer did not move. Lower the learning rate, warm up longer, "
            "look at this step's samples, or train in float32"
        )
    return loss, grad_norm


def _norm(parameters: list[nn.Parameter]) -> torch.Tensor:
    """Global 2-norm of the gradients, float32[]: also where they are bfloat16, whose own norm would keep 3 digits."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.promote_types(g.dtype, torch.float32)) for g in grads]
    return torch.linalg.vector_norm(torch.stack(norms)).float()


def _advance(scheduler: torch.optim.lr_scheduler.LRScheduler, *, moved: bool) -> None:
    if moved:
        scheduler.step()
        return
    with warnings.catch_warnings():
        # torch takes a schedule that moves before its optimizer for a mistake; here the step had nothing to learn.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        scheduler.step()
