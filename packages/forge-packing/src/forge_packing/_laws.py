"""A BatchPlan to nothing, or to the PackingError that names the first law that it breaks."""

from typing import TYPE_CHECKING, NoReturn

import numpy as np

from forge_packing._errors import PackingError

if TYPE_CHECKING:
    from forge_packing._batch_plan import BatchPlan


def verify(plan: "BatchPlan") -> None:
    """Raise PackingError unless the plan keeps every law that `BatchPlan.check` states."""
    _structure(plan)
    _epochs(plan)
    _steps(plan)
    _budget(plan)


def _broken(law: str, detail: str) -> NoReturn:
    raise PackingError(f"the plan breaks a law: {law}; {detail}. Make it again with plan()")


def _structure(plan: "BatchPlan") -> None:
    """The arrays fit together, and all ranks have the same number of micro-batches in every step."""
    ends = (plan._step_starts, plan._order.size), (plan._micro_batch_starts, plan._members.size)
    for starts, size in ends:
        if starts.size < 1 or starts[0] != 0 or starts[-1] != size or (np.diff(starts) < 0).any():
            _broken("offsets rise from 0 to the number of samples", f"found {starts.size} offsets for {size} samples")
    steps = plan._step_epochs.size
    if steps < 1 or plan._step_starts.size != steps + 1 or plan._pass_starts.size != steps + 1:
        _broken("every step has offsets and an epoch", f"found {steps} epochs and {plan._step_starts.size - 1} steps")
    if plan._pass_starts[0] != 0 or (np.diff(plan._pass_starts) < 1).any():
        _broken("every step has a micro-batch", f"found {plan._pass_starts.tolist()[:8]}")
    if plan._pass_starts[-1] * plan.world_size != plan._micro_batch_starts.size - 1:
        found = f"{plan._micro_batch_starts.size - 1} for {plan._pass_starts[-1]} on each of {plan.world_size}"
        _broken("all ranks have the same number of micro-batches", f"found {found}")
    for name, array in ("order", plan._order), ("members", plan._members):
        if array.min() < 0 or array.max() >= plan.lengths.size:
            _broken("every index is one of the data's", f"{name} holds {array.min()} to {array.max()} of {plan.lengths.size}")


def _epochs(plan: "BatchPlan") -> None:
    """A sample comes once an epoch; only the run's end may cut an epoch short, only an epoch's end a step."""
    sizes = np.diff(plan._step_starts)
    epochs = plan._step_epochs
    if epochs[0] != 0 or not np.isin(np.diff(epochs), (0, 1)).all():
        _broken("epochs follow each other", f"found {epochs.tolist()[:8]}")
    last_of_epoch = np.append(np.diff(epochs) == 1, True)
    short = np.flatnonzero(~last_of_epoch & (sizes != plan.batch_size) | (sizes < 1) | (sizes > plan.batch_size))
    if short.size:
        _broken("every step has batch_size samples but the last of an epoch", f"step {short[0]} has {sizes[short[0]]}")
    epoch_of = np.repeat(epochs, sizes)
    by_sample = np.lexsort((plan._order, epoch_of))
    twice = np.flatnonzero((np.diff(plan._order[by_sample]) == 0) & (np.diff(epoch_of[by_sample]) == 0))
    if twice.size:
        at = by_sample[twice[0]]
        _broken("a sample comes once an epoch", f"sample {plan._order[at]} comes again in epoch {epoch_of[at]}")
    n = plan.lengths.size
    whole = n // plan.batch_size * plan.batch_size if plan.drop_last else n
    seen = np.bincount(epoch_of)
    cut_by_max_steps = plan.max_steps is not None and epochs.size == plan.max_steps
    wrong = np.flatnonzero((seen != whole)[:-1] if cut_by_max_steps else seen != whole)
    if wrong.size or seen[-1] > whole:
        epoch = wrong[0] if wrong.size else seen.size - 1
        _broken("an epoch holds every sample", f"epoch {epoch} has {seen[epoch]} of {whole}")
    if not cut_by_max_steps and seen.size != plan.epochs:
        _broken("the run has as many epochs as asked for", f"found {seen.size} of {plan.epochs}")


def _steps(plan: "BatchPlan") -> None:
    """A step's micro-batches hold exactly its samples, each in the order of the step."""
    bounds = plan._micro_batch_starts[plan._pass_starts * plan.world_size]
    wrong = np.flatnonzero(bounds != plan._step_starts)
    if wrong.size:
        _broken("a step's micro-batches hold exactly its samples", f"they differ in number in step {wrong[0] - 1}")
    step_of = np.repeat(np.arange(plan.num_steps), np.diff(plan._step_starts))
    by_order, by_member = np.lexsort((plan._order, step_of)), np.lexsort((plan._members, step_of))
    wrong = np.flatnonzero(plan._order[by_order] != plan._members[by_member])
    if wrong.size:
        _broken("a step's micro-batches hold exactly its samples", f"step {step_of[by_order[wrong[0]]]} has others")
    position = np.empty_like(by_order)
    position[by_member] = by_order
    micro_batch_of = np.repeat(np.arange(plan._micro_batch_starts.size - 1), np.diff(plan._micro_batch_starts))
    wrong = np.flatnonzero((np.diff(position) < 0) & (np.diff(micro_batch_of) == 0))
    if wrong.size:
        _broken("a micro-batch keeps the order of its step", f"not so in step {step_of[wrong[0]]}")


def _budget(plan: "BatchPlan") -> None:
    """No micro-batch is over max_tokens."""
    sums = np.concatenate([[0], np.cumsum(plan.lengths[plan._members])])
    tokens = np.diff(sums[plan._micro_batch_starts])
    over = np.flatnonzero(tokens > plan.max_tokens)
    if over.size:
        step = np.searchsorted(plan._pass_starts * plan.world_size, over[0], side="right") - 1
        _broken(f"no micro-batch is over max_tokens={plan.max_tokens}", f"one of step {step} has {tokens[over[0]]} tokens")
