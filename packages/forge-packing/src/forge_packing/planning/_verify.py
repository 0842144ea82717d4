"""A BatchPlan to nothing, or to the PackingError that names the first law that it breaks."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from forge_packing._errors import PackingError
from forge_packing.planning._steps import Divided, Ordered
from forge_packing.planning._steps_from_sampled import sampled_blocks

if TYPE_CHECKING:
    from forge_packing.planning._batch_plan import BatchPlan


def verify(plan: "BatchPlan", most_steps: int | None) -> None:
    """Raise PackingError unless the plan keeps every law that `BatchPlan.check` states."""
    for number in sampled_blocks(plan._steps, most_steps):
        block = plan._steps.divided(number)
        verify_order(plan, block.ordered)
        verify_division(plan, block)
    if most_steps is None and plan.weights is None:
        _epochs(plan)


def verify_order(plan: "BatchPlan", block: Ordered) -> None:
    """The steps have the sizes that the batch size gives them, and the samples that the epoch or the shares do."""
    starts, samples = block.step_starts, block.samples
    if starts.size < 2 or starts[0] != 0 or starts[-1] != samples.size or (np.diff(starts) < 1).any():
        _broken("offsets rise from 0 to the number of samples", f"found {starts.size} offsets for {samples.size} samples")
    n = plan.lengths.size
    if samples.min() < 0 or samples.max() >= n:
        _broken("every index is one of the data's", f"the order holds {samples.min()} to {samples.max()} of {n}")
    per_epoch = n // plan.batch_size * plan.batch_size if plan.drop_last else n
    steps = -(-per_epoch // plan.batch_size)
    step = block.first + np.arange(starts.size - 1)
    wanted = np.where((step + 1) % steps == 0, per_epoch - (steps - 1) * plan.batch_size, plan.batch_size)
    wrong = np.flatnonzero(np.diff(starts) != wanted)
    if wrong.size:
        at = wrong[0]
        found = f"step {step[at]} has {starts[at + 1] - starts[at]}, not {wanted[at]}"
        _broken("every step has batch_size samples but the last of an epoch", found)
    if plan.weights is None:
        epoch_of = np.repeat(step // steps, np.diff(starts))
        by_sample = np.lexsort((samples, epoch_of))
        twice = np.flatnonzero((np.diff(samples[by_sample]) == 0) & (np.diff(epoch_of[by_sample]) == 0))
        if twice.size:
            at = by_sample[twice[0]]
            _broken("a sample comes once an epoch", f"sample {samples[at]} comes again in epoch {epoch_of[at]}")
        return
    assert plan.sources is not None
    drawn = np.bincount(plan.sources[samples], minlength=plan.weights.size)
    period = int(plan.weights.sum())
    off = np.flatnonzero(np.abs(drawn * period - plan.weights * samples.size) >= 2 * period)
    if off.size:
        share = f"{plan.weights[off[0]]}/{period}"
        _broken(
            "every source keeps its share to within 2", f"source {off[0]} has {drawn[off[0]]} of {samples.size}, not {share}"
        )


def verify_division(plan: "BatchPlan", block: Divided) -> None:
    """Each step is divided exactly, within the budget, and alike on all ranks."""
    step_starts, samples = block.ordered.step_starts, block.ordered.samples
    starts, passes, members = block.micro_batch_starts, block.pass_starts, block.members
    if starts.size < 2 or starts[0] != 0 or starts[-1] != members.size or (np.diff(starts) < 0).any():
        _broken("offsets rise from 0 to the number of samples", f"found {starts.size} offsets for {members.size} samples")
    if passes.size != step_starts.size or passes[0] != 0 or (np.diff(passes) < 1).any():
        _broken("every step has a micro-batch", f"found {passes.tolist()[:8]}")
    if passes[-1] * plan.world_size != starts.size - 1:
        found = f"{starts.size - 1} for {passes[-1]} on each of {plan.world_size}"
        _broken("all ranks have the same number of micro-batches", f"found {found}")
    wrong = np.flatnonzero(starts[passes * plan.world_size] != step_starts)
    if wrong.size:
        step = block.ordered.first + wrong[0] - 1
        _broken("a step's micro-batches hold exactly its samples", f"they differ in number in step {step}")
    step_of = np.repeat(block.ordered.first + np.arange(step_starts.size - 1), np.diff(step_starts))
    wrong = np.flatnonzero(members[np.lexsort((members, step_of))] != np.arange(samples.size))
    if wrong.size:
        _broken("a step's micro-batches hold exactly its samples", f"step {step_of[wrong[0]]} has others")
    micro_batch_of = np.repeat(np.arange(starts.size - 1), np.diff(starts))
    wrong = np.flatnonzero((np.diff(members) < 0) & (np.diff(micro_batch_of) == 0))
    if wrong.size:
        _broken("a micro-batch keeps the order of its step", f"not so in step {step_of[wrong[0]]}")
    tokens = np.diff(np.concatenate([[0], np.cumsum(plan.lengths[samples[members]])])[starts])
    over = np.flatnonzero(tokens > plan.max_tokens)
    if over.size:
        step = block.ordered.first + np.searchsorted(passes * plan.world_size, over[0], side="right") - 1
        _broken(f"no micro-batch is over max_tokens={plan.max_tokens}", f"one of step {step} has {tokens[over[0]]} tokens")


def _epochs(plan: "BatchPlan") -> None:
    """A whole epoch holds every sample (or all but those of the short step that drop_last leaves out), none twice."""
    order = plan._steps.order
    for epoch, stop in _ends(plan.num_samples, order.per_epoch):
        seen = np.zeros(plan.lengths.size, dtype=bool)
        for start in range(epoch * order.per_epoch, stop, 2**16):
            seen[order.drawn(start, min(start + 2**16, stop))] = True
        found, wanted = int(np.count_nonzero(seen)), stop - epoch * order.per_epoch
        if found != wanted:
            _broken("an epoch holds every sample once", f"epoch {epoch} has {found} of {wanted}")


def _ends(total: int, per_epoch: int) -> Iterator[tuple[int, int]]:
    """Each epoch and the position where it ends, the last one where the run does."""
    for epoch in range(-(-total // per_epoch)):
        yield epoch, min((epoch + 1) * per_epoch, total)


def _broken(law: str, detail: str) -> NoReturn:
    raise PackingError(f"the plan breaks a law: {law}; {detail}. Make it again with plan()")
