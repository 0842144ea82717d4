"""The one loop: steps of batches → a trained model, one `StepOutput` a step.

It is a generator: logging, evaluating, saving and stopping are the body of the caller's `for` loop.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any, Literal

import attrs
import numpy as np
import torch
from torch import nn

from forge_algos._errors import AdapterError, DivergedError
from forge_algos._modules import mode, not_finite, set_training
from forge_algos._parallel import ALONE, Parallel
from forge_algos.adaptations.base._adaptation import Adaptation
from forge_algos.isolation._guard import guard_packed
from forge_algos.losses import LossTerms
from forge_algos.objectives import Bound, FollowsSteps, Objective
from forge_algos.settings._moe import MoEAuxLoss
from forge_algos.training._average import WeightAverage
from forge_algos.training._columns import Columns, columns
from forge_algos.training._idle_parts import idle_parts_take_part
from forge_algos.training._quantized_weights import InPlace
from forge_algos.training._router_loss import RouterLoss, make_router_loss
from forge_algos.training._step import Sums, begin_step, exact_sum, loaded, measure_totals, optimizer_training


@attrs.frozen(kw_only=True)
class StepOutput:
    """Result of one optimizer step; the same on every rank, except for `seconds`."""

    step: int
    """Number of the step, from `first_step`."""
    loss: float
    """Mean over the global batch's terms (learned tokens, pairs), before the step, and the routers' auxiliary loss
    times its coefficient; 0 where nothing was learned."""
    loss_count: float
    """Terms of the global batch, of all ranks, in the objective's `unit`; the sum of their weights, if they have any."""
    tokens: int
    """All tokens that went through the model, of all ranks."""
    samples: int
    """Rows of the data: documents, pairs, completions."""
    grad_norm: float
    """Global norm of the gradients before clipping."""
    learning_rate: float
    """The rate that this step used, or would have used."""
    seconds: float
    """Time from asking for the batches to the optimizer's move,
    without the caller's own work between steps."""
    figures: Mapping[str, float] = attrs.field(factory=dict)
    """The objective's figures beside the loss, over the global batch: an accuracy, a margin;
    empty where nothing was learned. With routers `aux_loss`, before its coefficient."""
    expert_load: tuple[tuple[float, ...], ...] = ()
    """Share of the step's tokens that each layer's routers gave to each expert, by the k likeliest;
    empty for a model without an auxiliary loss."""
    skipped: bool = False
    """Whether the weights stayed because the loss or the gradient norm was NaN or infinite
    (`on_nan="skip"`)."""


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
    parallel: Parallel = ALONE,
    adaptation: Adaptation | None = None,
    first_step: int = 1,
    on_nan: Literal["stop", "skip"] = "stop",
    moe_aux_loss: MoEAuxLoss = "global",
    router_aux_loss_coef: float | None = None,
    average: WeightAverage | None = None,
    quantized: InPlace | None = None,
    keep_casts: bool = False,
    media: bool = False,
) -> Iterator[StepOutput]:
    """Take one optimizer step for each element of `steps`.

    A step's loss is the sum over the micro-batches of all ranks divided by the terms of all of them (learned tokens, pairs; the
    sum of their weights where tokens have some), counted before the first forward: the gradients do not depend on how the step
    is cut. Micro-batches with nothing to learn (empty ones too) are skipped. A step with nothing to learn moves no weight and
    no optimizer state, only the schedule; its `loss_count` is 0.

    Gradients stay on the parameters until the next step begins, as the optimizer left them. The host waits for the device once
    a step (once more where the objective measures the step beforehand). An optimizer with modes of its own (schedule-free) is
    in its training mode during a step and out of it whenever the generator yields or ends. Guards against packed rows with a
    cache or a mask while it runs; the end, or closing the generator, restores the modules' modes.

    Args:
        model: on `device`, whose trainable parameters `optimizer` holds.
        steps: for each step this rank's micro-batches, in the objective's form; on every rank equally many, in as many
            steps.
        objective: what is learned; `SFT()`.
        optimizer: moved once a step.
        scheduler: stepped once a step.
        max_grad_norm: gradients are scaled down to this global norm; 0 turns clipping off.
        device: where batches go; the model's by default.
        autocast: makes the context that forwards run in, for instance `partial(torch.autocast, "cpu", torch.bfloat16)`.
        parallel: the ranks that share each step, which divided `model` and wrapped `optimizer`; this process alone by default.
        adaptation: what `adapt` made of the model; it takes from gradients and weights what may not move. None where everything
            may.
        first_step: the number of the first element of `steps`, where a run resumes.
        on_nan: what a loss or gradient norm that is no number does: "stop" raises, "skip" leaves the weights and the
            optimizer's state as they are, moves the schedule, and reports `skipped=True`.
        moe_aux_loss: auxiliary loss of a mixture of experts, where the model's configuration has a coefficient for it:
            "global", over all tokens of the step's micro-batches that have something to learn, for which each is run once more
            without gradients where a rank has several; "trl", the mean of each micro-batch's own; or "off". An evaluation's
            loss is without it.
        router_aux_loss_coef: its weight; None is the one in the model's configuration.
        average: moving average of the weights, which follows the steps.
        quantized: rounds weights while losses and gradients are computed; the optimizer moves them unrounded.
        keep_casts: make the casts of `autocast` once a step, not for each micro-batch and recomputation. They lie beside the
            weights until the step's last backward pass: not for weights that ranks divide.
        media: whether rows have images: layers that attend to images alone (Mllama's) then have gradients of zero by rows
            without, however a step is cut; otherwise none, and the optimizer passes them over.

    Yields:
        StepOutput: after each step.

    Raises:
        DivergedError: the loss or the gradient norm is NaN or infinite and on_nan="stop"; on all ranks together, and the
            optimizer has not moved on any.
        AdapterError: the model is under an adaptation that acts around each step, and `adaptation` was not given.
        OptimizerError: the optimizer does not let the adaptation keep its rule.
        PackedBatchError: a batch is malformed, or a forward would mix documents.
        UnevenRanksError: the ranks were not given equally many steps or micro-batches.
    """
    if adaptation is None:
        if any(getattr(module, "projects", False) for module in model.modules()):
            raise AdapterError(
                "the model is under an OSFT that takes back after each step what may not move, and train was not given it: "
                "pass adaptation=..., what `adapt` returned"
            )
        adaptation = Adaptation(model)
    adaptation.check_optimizer(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    device = next(model.parameters()).device if device is None else torch.device(device)
    with mode(model, training=True), guard_packed(model), idle_parts_take_part(model, media=media), ExitStack() as hooks:
        # What a probe tries is what trains: the same kernels, in the same dtype.
        with autocast():
            bound = objective.bind(model, device=device)
        router_loss = make_router_loss(model, moe_aux_loss, device=device, parallel=parallel, coefficient=router_aux_loss_coef)
        hooks.enter_context(router_loss.hooked() if router_loss else nullcontext())
        remaining, step = iter(steps), first_step
        started = time.perf_counter()
        while True:
            micro_batches = next(remaining, None)
            if isinstance(micro_batches, Iterator):  # it is counted before it is run
                micro_batches = list(micro_batches)
            counted = columns(micro_batches, objective, parallel)
            if counted is None or micro_batches is None:
                return
            if not model.training:
                # The caller's own work between two steps may have left it in evaluation mode.
                set_training(model)
            learning_rate = float(optimizer.param_groups[0]["lr"])
            loss, grad_norm, figures, load, moves = 0.0, 0.0, {}, (), False
            with optimizer_training(optimizer, model):
                parallel.zero_grad(optimizer)
                if counted.count:
                    with nullcontext() if quantized is None else quantized.in_place():
                        sums = _accumulate(
                            micro_batches,
                            counted,
                            bound,
                            objective,
                            autocast,
                            parallel,
                            router_loss,
                            device,
                            keep_casts=keep_casts,
                        )
                    adaptation.before_step()
                    norm = parallel.grad_norm(parameters)
                    loss, grad_norm, figures, problem = _read_totals(
                        sums, norm, counted.count, objective, parallel, router_loss
                    )
                    load = router_loss.load() if router_loss else ()
                    # Freed in the next step, they would be said to be unknown to a profiler that begins there.
                    del sums, norm
                    if problem and on_nan == "stop":
                        remedy = "Lower the learning rate, warm up longer, look at this step's samples, or train in float32"
                        if name := not_finite(model):
                            remedy = f"The weight {name} holds numbers that are not finite: look at the model's files"
                        raise DivergedError(f"step {step}: {problem}. The optimizer did not move. {remedy}")
                    moves = not problem
                if moves:
                    # Only then: scaling passes over every gradient, to multiply by 1 where there is nothing to clip.
                    if max_grad_norm and grad_norm + 1e-6 > max_grad_norm:
                        parallel.scale_grads(parameters, _clip_factor(max_grad_norm, grad_norm))
                    if average is not None:
                        average.before_step()
                    parallel.step(optimizer)
                    adaptation.after_step()
                if average is not None:
                    average.after_step(step, moved=moves)
                if isinstance(objective, FollowsSteps):
                    if moves:
                        objective.after_step(figures)
                    figures = {**figures, **objective.state()}
            _advance(scheduler, moved=moves)
            yield StepOutput(
                step=step,
                loss=loss,
                loss_count=counted.count,
                tokens=counted.tokens,
                samples=counted.samples,
                grad_norm=grad_norm,
                learning_rate=learning_rate,
                seconds=time.perf_counter() - started,
                figures=figures,
                expert_load=load,
                skipped=bool(counted.count) and not moves,
            )
            step += 1
            started = time.perf_counter()


def _accumulate(
    micro_batches: Sequence[Any],
    counted: Columns,
    bound: Bound,
    objective: Objective,
    autocast: Callable[[], AbstractContextManager[Any]],
    parallel: Parallel,
    router_loss: RouterLoss | None,
    device: torch.device,
    *,
    keep_casts: bool,
) -> Sums:
    """Add up gradients of the global mean over the active columns; returns this rank's sums.
    The host has not waited for them yet.
    """
    begin_step(bound, [(micro_batches, counted)], autocast, parallel)
    totals = measure_totals(bound, [(micro_batches, counted)], objective, autocast, parallel)
    sums = Sums(objective.stats)
    active = counted.active
    ready = loaded(bound, (micro_batches[k] if counted.mine[k] else objective.idle() for k in active))
    batches = dict(zip(active, ready, strict=True))
    # Casts of weights are kept while an autocast is open: one that is off around the step makes one cast a step, not one a use.
    keeping = torch.autocast(device.type, enabled=False) if keep_casts else nullcontext()

    def run(k: int) -> LossTerms:
        with autocast():
            return bound(batches[k], totals)

    if router_loss is not None:
        router_loss.begin([counted.mine[k] for k in active], [partial(run, k) for k in active], device)
    with keeping:
        for k in active:
            mine = counted.mine[k] > 0
            with parallel.micro_batch(last=k == active[-1]):
                with nullcontext() if router_loss is None else router_loss.recording():
                    terms = run(k)
                loss = terms.sum / counted.count
                if router_loss is not None:
                    loss = loss + router_loss.term(counts=mine)
                # Times 0 and not left out: every parameter takes part in the backward pass, as on the ranks that learn.
                parallel.backward(loss if mine else loss * 0)
            if mine:
                sums.add(terms)
    return sums


def _read_totals(
    sums: Sums,
    norm: torch.Tensor,
    count: float,
    objective: Objective,
    parallel: Parallel,
    router_loss: RouterLoss | None,
) -> tuple[float, float, dict[str, float], str | None]:
    """Read the step's numbers, the same on every rank: the step's one wait for the device.

    Returns:
        tuple: loss, gradient norm, figures, and the problem with the first two, if any.
    """
    mine, (grad_norm, *parts) = sums.read(norm, *(router_loss.values if router_loss else ()))
    bad_norm, shared = not math.isfinite(grad_norm), parallel.data_parallel_size < parallel.world_size
    auxiliary = [] if router_loss is None else [exact_sum(parts)]
    total, bad_norms, *stats = parallel.sum([mine[0], float(bad_norm and not shared), *mine[1:], *auxiliary])
    if shared:
        # The sum counts one rank of each shard; a norm may be bad on another.
        bad_norms = parallel.any(bad_norm)
    aux_loss = stats.pop() if auxiliary else 0.0
    figures = objective.figures(dict(zip(sums.names, stats, strict=True)), count)
    loss = total / count
    if router_loss is not None:
        loss += router_loss.routers.coefficient * aux_loss
        figures = {**figures, "aux_loss": aux_loss}
    if not math.isfinite(loss):
        return loss, grad_norm, figures, f"the loss is {loss}"
    if bad_norms:
        # The same message on all ranks, also where the norm is not finite on one of them alone.
        grad_norm = math.nan if math.isfinite(grad_norm) else grad_norm
        return loss, grad_norm, figures, f"the gradient norm is {grad_norm} (loss {loss:.4g})"
    return loss, grad_norm, figures, None


def _clip_factor(max_grad_norm: float, grad_norm: float) -> float:
    """Compute the factor that clips gradients of this norm: torch's own float32 bits, no tensor."""
    with np.errstate(over="ignore"):
        return min(1.0, float(np.float32(max_grad_norm) * (np.float32(1) / (np.float32(grad_norm) + np.float32(1e-6)))))


def _advance(scheduler: torch.optim.lr_scheduler.LRScheduler, *, moved: bool) -> None:
    if moved:
        scheduler.step()
        return
    with warnings.catch_warnings():
        # torch warns of a schedule that moves before its optimizer; here the step had nothing to learn.
        warnings.filterwarnings("ignore", message=r"Detected call of `lr_scheduler\.step\(\)` before")
        scheduler.step()
